"""The error tree: everything Terrine raises on purpose is a `TerrineError`.

A message says what arrived, what was wanted, and what to do next, on one line.
"""

from __future__ import annotations

from typing import Any


class TerrineError(Exception):
    """The root: catch this to catch everything Terrine refuses."""


class InvalidArgument(TerrineError, ValueError):
    """A value outside what the called function can accept."""


class UnsupportedEvent(TerrineError, TypeError):
    """An accountant was given an event whose cost it cannot bound."""

    def __init__(self, event: Any, *, by: str, hint: str = "") -> None:
        name = type(event).__name__
        tail = f"; {hint}" if hint else "; use an accountant that names it, or state its cost as ApproximateDP"
        super().__init__(f"{name}: {by} has no proven bound for this event{tail}")
        self.event = event
        self.by = by


class MalformedEvents(TerrineError, ValueError):
    """A text that should hold events does not."""


class BudgetExceeded(TerrineError):
    """What was asked for would cost more than what is left; nothing was released."""


class MissingExtra(TerrineError, ImportError):
    """A part of Terrine needs a package that is not installed."""

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(f"{package} is not installed; pip install 'terrine[{extra}]'")


class Halted(TerrineError, RuntimeError):
    """A stream that has given out all it was paid for was asked again."""


class LedgerUnavailable(TerrineError):
    """The ledger's database cannot be used now: nothing was charged and nothing was released."""


class LedgerDamaged(TerrineError):
    """The ledger's records are not what Terrine wrote: nothing was charged and nothing was released."""


class EngineFailed(TerrineError, RuntimeError):
    """A database engine failed on private rows: what it said is withheld, and what was charged stays charged."""


class OutOfOrder(TerrineError, RuntimeError):
    """A run was asked for something at the wrong moment; nothing was released."""


class WeakGuarantee(UserWarning):
    """A guarantee that holds and means little: no error, but to be said aloud."""


class PeopleUnprotected(UserWarning):
    """Rows are protected one by one, and some people seem to have several: each of them is protected less."""
