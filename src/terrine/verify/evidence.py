"""Checks of what stands beside the claim: the model's weights, the ledger's charge, the audit."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from terrine.errors import InvalidArgument
from terrine.verify.claims import claimed
from terrine.verify.manifest import MODEL, PRIVACY, RESULTS, WEIGHTS, parsed, read_json
from terrine.verify.unchecked import Unchecked

_TYPES = ("F32",)  # that a run writes


def model(folder: Path) -> str:
    """The weights are whole, and as many as model.json and results.json say; what they mean, a signature binds."""
    record, told = read_json(folder / MODEL), read_json(folder / RESULTS)
    shapes = _shapes(folder / WEIGHTS)
    numbers = sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith("whitening."))
    if numbers != told["parameters"]:
        raise InvalidArgument(f"{WEIGHTS}: {numbers:,} trained numbers; {RESULTS} says {told['parameters']:,}")
    privacy, outputs = read_json(folder / PRIVACY), len(record["classes"]) or 1
    if privacy["method"] == "one release" and numbers != privacy["features"] * outputs:
        raise InvalidArgument(f"{WEIGHTS}: {numbers:,} numbers are not a linear model of {PRIVACY}'s features")
    if len(record["classes"]) != told["classes"] or record["model"] != told["model"]:
        raise InvalidArgument(f"{MODEL}: another model than {RESULTS} says")
    label = {} if record["schema"] is None else record["schema"]["label"]
    if label.get("classes", record["classes"]) != record["classes"]:
        raise InvalidArgument(f"{MODEL}: classes {record['classes']}; those of its schema are {label['classes']}")
    if bool(record["whitened"]) != any(name.startswith("whitening.") for name in shapes):
        raise InvalidArgument(f"{WEIGHTS}: does not fit {MODEL}, which says whitened: {record['whitened']}")
    return f"{record['model']}, {len(record['classes'])} classes, {numbers:,} parameters"


def _shapes(path: Path) -> dict[str, list[int]]:
    """The names and shapes of the tensors in a file of the safetensors format: a header of JSON, then their bytes."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parsed(file.read(length), path.name) if length < path.stat().st_size else {}
        except struct.error:
            header = {}
    header.pop("__metadata__", None)
    ends = sorted(one["data_offsets"] for one in header.values())
    whole = ends and [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    if not whole or 8 + length + ends[-1][1] != path.stat().st_size:
        raise InvalidArgument(f"{path.name}: cut short or damaged; want the file that was handed on")
    for name, one in header.items():
        start, end = one["data_offsets"]
        whole = all(type(size) is int and size > 0 for size in one["shape"])
        if not whole or one["dtype"] not in _TYPES or end - start != 4 * math.prod(one["shape"]):
            raise InvalidArgument(f"{path.name}: {name} is not what a run writes: {one['dtype']} of {one['shape']}")
    if not np.isfinite(np.memmap(path, np.float32, "r", offset=8 + length)).all():
        raise InvalidArgument(f"{path.name}: numbers that are not finite; want the file that was handed on")
    return {name: one["shape"] for name, one in header.items()}


def charge(folder: Path, ledger: str | None, statement: Path | None) -> str:
    """The ledger holds the charge that the claim names, for the claim's events."""
    privacy, event = claimed(folder)
    told = privacy["ledger"]
    if told is None:
        if ledger is not None or statement is not None:
            raise InvalidArgument(f"{PRIVACY}: names no charge; the run was charged to no ledger")
        raise Unchecked("charged to no ledger: nothing adds this run's cost to that of others on the same data")
    if ledger is None and statement is None:
        raise Unchecked(f"names the charge {told['charge'][:16]}...; want --ledger, or --statement with an export")
    against = f"{told['charge']} {told['head'] or ''}"
    charges = _of_ledger(ledger, against) if ledger is not None else _of_statement(statement, against)
    if charges.get(told["charge"]) != event:
        raise InvalidArgument(f"{PRIVACY}: the charge {told['charge'][:16]}... paid for other events")
    head = "and so is the ledger's head after it" if told["head"] else "and the claim names no head after it"
    return f"the charge {told['charge'][:16]}... is there, for these events, {head}"


def _of_ledger(url: str, against: str) -> dict[str, Any]:
    """The events of all charges, by their hashes, of a ledger that holds the hashes `against`."""
    from terrine.ledger import Ledger

    with Ledger.open(url, create=False) as book:
        if findings := book.verify(against=against):
            raise InvalidArgument(f"the ledger does not verify: {findings[0]}")
        return {one.hash: one.event for account in book.accounts() for one in account.history()}


def _of_statement(path: Path | None, against: str) -> dict[str, Any]:
    """The same of an export."""
    from terrine.events import from_json
    from terrine.ledger import verify_export

    assert path is not None
    try:
        with path.open(encoding="utf-8") as file:
            findings = verify_export(file, against=against)
            file.seek(0)
            lines = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: no export of a ledger ({error}); terrine ledger export writes one") from None
    if findings:
        raise InvalidArgument(f"{path}: the export does not verify: {findings[0]}")
    return {line["charge"]["hash"]: from_json(line["charge"]["event"]) for line in lines if "charge" in line}


def audit(folder: Path) -> str:
    """The audit's numbers, where they are there, do not refute the claim."""
    if not (folder / "audit" / "canaries.npy").is_file():
        raise Unchecked("no audit was handed on: its scores are about private rows, and stay with the owner")
    from terrine.audit import one_run, verdict
    from terrine.audit.folder import read

    held = read(folder)
    assert held.canaries is not None
    found = verdict(held.claim, one_run.guess(*held.canaries))
    if found.violated:
        raise InvalidArgument(str(found))
    return str(found)
