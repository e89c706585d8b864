"""Progress bars on stderr, only where somebody is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], label: str, *, quiet: bool = False) -> Iterator[T]:
    """`items`, with a bar while they pass."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(file=sys.stderr)
    yield from rich_track(items, label, console=console, disable=quiet or not console.is_terminal, transient=True)
