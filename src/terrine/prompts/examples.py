"""Texts with classes, read from a file: JSON lines, CSV or TSV with `text` and `label`, or lines of `label text`."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument

ENDINGS = (".jsonl", ".csv", ".tsv", ".txt")


def read(path: str | Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """The texts of a file and the number of each one's class, told by its name or its number.

    Raises:
        InvalidArgument: there is no such file, a row lacks its text or label, or a label is not among `classes`.
    """
    rows, numbers = _rows(Path(path), labelled=True), {name: place for place, name in enumerate(classes)}
    numbers |= {str(place): place for place in range(len(classes)) if str(place) not in numbers}
    unknown = sorted({str(label) for _, label in rows} - set(numbers))
    if unknown:
        raise InvalidArgument(f"{path}: label {unknown[0]!r}: want one of {', '.join(classes)}; see --classes")
    return [text for text, _ in rows], [numbers[str(label)] for _, label in rows]


def read_pairs(path: str | Path) -> tuple[list[str], list[str]]:
    """The texts of a file and the answers that they are to get, as free text."""
    rows = _rows(Path(path), labelled=True)
    return [text for text, _ in rows], [str(label) for _, label in rows]


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file, whatever labels stand beside them; in a .txt file every line is a text."""
    return [text for text, _ in _rows(Path(path), labelled=False)]


def _rows(path: Path, *, labelled: bool) -> list[tuple[str, Any]]:
    if path.suffix.lower() not in ENDINGS:
        raise InvalidArgument(f"{path}: want a file of texts ending in {', '.join(ENDINGS)}")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: not readable ({error.strerror}); want a file of texts") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: not UTF-8; want a text file in UTF-8") from None
    rows = _parsed(path, content, labelled)
    if not rows:
        raise InvalidArgument(f"{path}: no texts in it; want at least one")
    return rows


def _parsed(path: Path, content: str, labelled: bool) -> list[tuple[str, Any]]:
    lines = [(place, line) for place, line in enumerate(content.split("\n"), start=1) if line.strip()]
    match path.suffix.lower():
        case ".txt":
            pairs = [line.strip().partition(" ") for _, line in lines]
            if labelled and (wrong := [place for (place, _), pair in zip(lines, pairs, strict=True) if not pair[2]]):
                raise InvalidArgument(f"{path}, line {wrong[0]}: want a label, a space and a text")
            return (
                [(text, label) for label, _, text in pairs] if labelled else [(line.strip(), None) for _, line in lines]
            )
        case ".jsonl":
            return [_fields(path, place, _object(path, place, line), labelled) for place, line in lines]
        case _:
            table = csv.DictReader(content.splitlines(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            return [_fields(path, place, row, labelled) for place, row in enumerate(table, start=2)]


def _object(path: Path, place: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{path}, line {place}: not JSON ({error.msg}); want an object a line") from None


def _fields(path: Path, place: int, row: Any, labelled: bool) -> tuple[str, Any]:
    wanted = ("text", "label") if labelled else ("text",)
    missing = [name for name in wanted if not isinstance(row, dict) or row.get(name) in (None, "")]
    if missing:
        raise InvalidArgument(f"{path}, line {place}: lacks {', '.join(missing)}; want {' and '.join(wanted)}")
    return str(row["text"]), row.get("label")
