"""What `verify` checks, in order, on the files that are handed on: offline, without data, without torch.

    files        every file of the release is there, whole, and the manifest is that of these files
    others       what else lies there is no part of the release, and is not checked
    signature    the manifest was signed by the key given
    texts        what is printed of it is of one line, and everything in it is to be seen
    claim        the events cost at most the claimed epsilon at the claimed delta, by two witnesses; unit, neighbours
    facts        noise, rate, steps and counts are those of the events, and what was asked for; the card is that of
                 the claim and the results
    model        the weights are those that model.json describes
    ledger       the charge is in the ledger, for these events
    audit        the audit's evidence does not refute the claim

A check finds a lie, or nothing, or cannot be made with what was given; what could not be checked is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrine import check
from terrine.errors import InvalidArgument, TerrineError
from terrine.verify import claims, evidence, manifest, signing
from terrine.verify.unchecked import Unchecked


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", check.printable(self.detail))  # it may quote what stands in the folder


@dataclass(frozen=True)
class Verification:
    """What was checked, and what could not be."""

    checks: tuple[Check, ...]
    unchecked: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check found a lie."""
        return all(one.ok for one in self.checks)

    @property
    def lie(self) -> Check | None:
        """The first check that failed."""
        return next((one for one in self.checks if not one.ok), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "ok": self.ok,
            "checks": [vars(one) for one in self.checks],
            "unchecked": [{"name": one.name, "detail": one.detail} for one in self.unchecked],
        }


def verify(
    path: str | Path,
    *,
    signed_by: str | Path | None = None,
    ledger: str | None = None,
    statement: str | Path | None = None,
) -> Verification:
    """Check the release in a folder.

    `signed_by` is a file with a public key, `ledger` the address of the ledger that was charged, `statement` a file
    that `terrine ledger export` wrote.

    Raises:
        InvalidArgument: there is no such folder, or no such key, ledger or statement.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InvalidArgument(f"{folder}: no such folder; want that of a finished run")
    key = None if signed_by is None else signing.load_public(Path(signed_by))
    checks: list[tuple[str, Callable[[], str]]] = [
        ("files", lambda: _files(folder)),
        ("manifest", lambda: _manifest(folder)),
        ("others", lambda: _others(folder)),
        ("signature", lambda: _signature(folder, key)),
        ("texts", lambda: claims.texts(folder)),
        ("claim", lambda: claims.price(folder)),
        ("unit", lambda: claims.unit(folder)),
        ("seed", lambda: claims.seed(folder)),
        ("facts", lambda: claims.facts(folder)),
        ("asked", lambda: claims.asked(folder)),
        ("card", lambda: claims.card(folder)),
        ("results", lambda: claims.results(folder)),
        ("model", lambda: evidence.model(folder)),
        ("ledger", lambda: evidence.charge(folder, ledger, None if statement is None else Path(statement))),
        ("audit", lambda: evidence.audit(folder)),
    ]
    made: list[Check] = []
    unchecked: list[Check] = []
    for name, look in checks:
        try:
            made.append(Check(name, True, look()))
        except Unchecked as reason:
            unchecked.append(Check(name, False, str(reason)))
        except TerrineError as error:
            made.append(Check(name, False, str(error)))
        except Exception as error:  # whatever a file makes our readers do: a run does not write such a file
            made.append(Check(name, False, f"a file is not what a run writes ({type(error).__name__}: {error})"))
        if name == "files" and not made[-1].ok:
            break  # nothing else can be read
    return Verification(tuple(made), tuple(unchecked))


def refuse_lies(path: str | Path) -> None:
    """Refuse to go on with a folder that lies. A run that says itself that it is a test with a seed does not.

    Raises:
        InvalidArgument: the first lie by name.
    """
    lie = next((one for one in verify(path).checks if not one.ok and one.name != "seed"), None)
    if lie is not None:
        raise InvalidArgument(f"{path}: does not verify: {lie.name}: {lie.detail}; terrine verify {path} says more")


def _files(folder: Path) -> str:
    wanted = (*manifest.HANDED_ON, manifest.MANIFEST)
    if missing := [name for name in wanted if not (folder / name).is_file()]:
        raise InvalidArgument(f"{', '.join(missing)}: missing; want all files of the release")
    listed = {one["name"] for one in manifest.read_json(folder / manifest.MANIFEST)["subject"]}
    if strange := listed - {*manifest.HANDED_ON, *manifest.MAY_BE_HANDED_ON}:
        raise InvalidArgument(f"{manifest.MANIFEST}: lists {sorted(strange)[0]!r}, which is no file of a release")
    return f"{len(wanted)} files are there"


def _manifest(folder: Path) -> str:
    kept, made = manifest.read_json(folder / manifest.MANIFEST), manifest.statement(folder)
    listed = {one["name"]: one["digest"]["sha256"] for one in kept["subject"]}
    found = {one["name"]: one["digest"]["sha256"] for one in made["subject"]}
    absent = [name for name in listed if name not in found and name in manifest.MAY_BE_HANDED_ON]
    for name, one in found.items():
        if listed.get(name) != one:
            raise InvalidArgument(f"{name}: not the file that the manifest lists (SHA-256 {one[:16]}...)")
    made["subject"] = [{"name": name, "digest": {"sha256": one}} for name, one in listed.items()]
    if made != kept or len(kept["subject"]) != len(listed):
        raise InvalidArgument(f"{manifest.MANIFEST}: says something else of the claim than {manifest.PRIVACY}")
    left = f"; not handed on: {', '.join(absent)}" if absent else ""
    return f"SHA-256 of {len(found)} files{left}"


def _others(folder: Path) -> str:
    known = {*manifest.HANDED_ON, *manifest.MAY_BE_HANDED_ON, manifest.MANIFEST, manifest.SIGNED, "owner", "audit"}
    names = sorted(ascii(path.name)[1:-1] for path in folder.iterdir() if path.name not in known)
    if not names:
        return "no other file lies there"
    told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    again = "; `terrine report` writes report.html anew, from what was checked" if "report.html" in names else ""
    raise Unchecked(f"{told}: no part of the release, so anything may stand there{again}")


def _signature(folder: Path, key: Any) -> str:
    if key is not None:
        if not (folder / manifest.SIGNED).is_file():
            raise InvalidArgument(f"{manifest.SIGNED}: missing; the release is not signed")
        return f"signed by the key {signing.check_signature(folder, key)}"
    if not (folder / manifest.SIGNED).is_file():
        raise Unchecked("not signed: whoever can write the folder can make another release of it")
    names = ", ".join(signing.signers(folder))
    signing.check_payload(folder)
    raise Unchecked(f"says it is signed by {names}; want --signed-by with the signer's public key")
