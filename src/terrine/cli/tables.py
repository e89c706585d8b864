"""Tables of answers, printed as they are: a cell is somebody's text, and no mark-up for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from terrine import check


def show(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print the rows; a character that would not be seen, or would move what is, is shown as its escape."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*map(check.printable, columns))
    for row in rows:
        shown.add_row(*(_cell(value) for value in row))
    Console(highlight=False, markup=False, emoji=False).print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else check.printable(str(value))
