"""Progress bars on stderr, only where somebody is watching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], label: str, *, quiet: bool = False) -> Iterator[T]:
    """`items`, with a bar while they pass."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(file=sys.stderr)
    yield from rich_track(items, label, console=console, disable=quiet or not console.is_terminal, transient=True)


@contextlib.contextmanager
def counted(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A function that moves a bar to (done, total); None where nobody is watching."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
