"""What a gateway gives, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from terrine.events import Event


@dataclass(frozen=True)
class Price:
    """What a question or a training would cost; free, and nobody's row was looked at."""

    epsilon: float
    delta: float
    event: Event
    half_widths: dict[str, float | None]
    """Of each noisy column, its half-width at 95%, where that can be known beforehand."""
    in_archive: bool
    fits_budget: bool
    fits_allowance: bool
    allowance_left: float
    allowance_delta_left: float


@dataclass(frozen=True)
class RemoteAnswer:
    """A noisy table that was checked: its event was priced anew, its charge's hash made anew."""

    request: str
    dataset: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    half_widths: dict[str, float]
    notes: tuple[str, ...]
    event: Event
    epsilon: float
    """What the answer cost when it was charged."""
    delta: float
    charge: str
    """The hash of the ledger's charge; written down, it shows later whether the ledger was rolled back."""
    from_archive: bool
    """Whether it was paid for before: then it cost nothing now."""
    signed: bool
    """Whether the server's signature was checked, by the key that was given."""
    record: dict[str, Any] = field(repr=False)
    """All that arrived."""

    @property
    def cost(self) -> float:
        """The epsilon that this very answer cost."""
        return 0.0 if self.from_archive else self.epsilon

    @property
    def table(self) -> list[dict[str, Any]]:
        """Rows by the names of their columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Request:
    """A request, and what became of it."""

    request: str
    dataset: str
    member: str
    kind: str
    state: str
    epsilon: float
    delta: float
    charged: bool
    reason: str
    said: str
    progress: str
    record: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class RemoteTraining:
    """A training that was taken in: `Gateway.wait` sees it through, `Gateway.download` fetches what is handed on."""

    request: str
    dataset: str
    state: str
    said: str
