"""Made-up rows of a schema, to show what a table looks like: from names and types alone."""

from __future__ import annotations

from typing import Any

ROWS = 3
_WORDS = ("alpha", "beta", "gamma")


def example_rows(columns: dict[str, str]) -> list[list[Any]]:
    """A few rows; nothing in them is anybody's."""
    return [[_value(kind.removeprefix("!").lower(), row) for kind in columns.values()] for row in range(ROWS)]


def _value(kind: str, row: int) -> Any:
    if kind.startswith(("int", "uint")):
        return row + 1
    if kind.startswith(("float", "decimal")):
        return 1.5 * (row + 1)
    if kind.startswith("bool"):
        return row % 2 == 0
    if kind.startswith("timestamp"):
        return f"2024-01-0{row + 1}T00:00:00"
    if kind.startswith("date"):
        return f"2024-01-0{row + 1}"
    return _WORDS[row]
