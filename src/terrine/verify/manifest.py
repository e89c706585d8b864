"""The manifest of a release: which files are handed on, the SHA-256 hash of each, and the claim they belong to.

It is an in-toto statement (https://in-toto.io/Statement/v1): the files are its subjects, the claim its predicate. Who
signs it signs the files and the claim together. Everything in it can be made again from the files, so whatever was
changed in it is found by making it again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from terrine import files
from terrine.errors import InvalidArgument

MANIFEST, SIGNED = "manifest.json", "manifest.signed.json"
WEIGHTS, MODEL, PRIVACY, RESULTS, CARD = (
    "model.safetensors", "model.json", "privacy.json", "results.json", "model_card.md",
)  # fmt: skip
EVENTS, ASKED = "events.json", "run.json"
HANDED_ON = (WEIGHTS, MODEL, PRIVACY, RESULTS, CARD)
"""What a release consists of."""
MAY_BE_HANDED_ON = (EVENTS, ASKED)
"""What may come with it."""

_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "urn:terrine:release:v1"
_LARGEST = 1 << 24  # bytes of a JSON file, or of a text
_LARGEST_OF_ALL = 1 << 34  # bytes of any file, which is read to its end for its hash


def statement(folder: Path) -> dict[str, Any]:
    """The manifest of the files as they lie there.

    Raises:
        InvalidArgument: one is missing, or privacy.json is no claim.
    """
    present = [name for name in (*HANDED_ON, *MAY_BE_HANDED_ON) if name in HANDED_ON or (folder / name).is_file()]
    privacy = read_json(folder / PRIVACY)
    try:
        claim = {name: privacy[name] for name in ("epsilon", "delta", "unit", "neighbours", "method")}
        events = json.dumps(privacy["events"], sort_keys=True, separators=(",", ":"))
    except KeyError as error:
        raise InvalidArgument(f"{folder / PRIVACY}: no {error}; want the claim of a finished run") from None
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest(folder / name)}} for name in present],
        "predicateType": _PREDICATE,
        "predicate": {"claim": claim, "events_sha256": hashlib.sha256(events.encode()).hexdigest()},
    }


def write(folder: Path) -> bytes:
    """Write the manifest of the files as they lie there; returns its bytes."""
    content = (json.dumps(statement(folder), indent=2, allow_nan=False) + "\n").encode()
    files.write(folder / MANIFEST, content, private=False)
    return content


def digest(path: Path) -> str:
    """The SHA-256 hash of a file.

    Raises:
        InvalidArgument: it cannot be read.
    """
    try:
        if (size := path.stat().st_size) > _LARGEST_OF_ALL:
            raise InvalidArgument(f"{path}: {size} bytes, want at most {_LARGEST_OF_ALL} in a file of a release")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; want every file of the release") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; keys that stand twice, nan and infinity are refused.

    Raises:
        InvalidArgument: it is not there, or not one JSON object.
    """
    return parsed(_content(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file of moderate size.

    Raises:
        InvalidArgument: it is not there, is too large, or no text.
    """
    try:
        return _content(path).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: not UTF-8; want a text") from None


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST:
            raise InvalidArgument(f"{path}: more than {_LARGEST} bytes; want a file of a run")
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; want every file of the release") from None


def parsed(content: bytes, name: str) -> dict[str, Any]:
    """A JSON object in some bytes, as strictly."""
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{name}: holds a {type(found).__name__}; want a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")
