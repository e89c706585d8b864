"""What an account has spent, in numbers and in words: what the filter used, what the charges cost, and which decides.

Three measures of one history, which need not agree:

    used      the share of the filter's room that is gone; whether the next charge is accepted depends on this alone
    planned   the certified epsilon of all charges as one list, sound if the whole list was fixed before any answer
    adaptive  an epsilon that holds however each charge was chosen after the answers before it
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass

from terrine.accounting import epsilon as certified_epsilon
from terrine.accounting.costs import price, shown
from terrine.errors import InvalidArgument, UnsupportedEvent
from terrine.events import Budget, Composed, Event, Repeated
from terrine.ledger.balance import WHOLE


@dataclass(frozen=True)
class Report:
    """What an account has spent at `delta`.

    `planned` is None where the certified accountant cannot bound the whole. `decides` is "filter", or "plan" where one
    event, fixed before any answer, was given the whole budget. `largest` is the epsilon of one more pure answer that
    still fits.
    """

    budget: Budget
    partitions: tuple[str, ...]
    delta: float
    charges: int
    decides: str
    used: float
    left: float
    largest: float
    planned: float | None
    adaptive: float
    reproducible: bool

    def words(self) -> dict[str, str]:
        """The report in plain words: what decides about the next charge, what the charges cost, what may be claimed."""
        return {"next charge": self._decision(), "price": self._price(), "claim": self._claim()}

    def _decision(self) -> str:
        if self.decides == "plan":
            return (
                "No more is accepted. The first charge is a plan, fixed before any answer was seen: its certified price"
                " decided that it fits, and it holds the whole budget."
            )
        where = " on every partition" if self.partitions else ""
        fits = f"one more answer{where} of up to epsilon {down(self.largest)} fits" if self.largest else "nothing fits"
        room = f"{percent(self.used)} of its room is used and {percent(self.left)} is left"
        return f"The filter decides: {room}; {fits}."

    def _price(self) -> str:
        if not self.charges:
            return "Nothing was charged yet."
        one = self.charges == 1
        what = "The one charge" if one else f"The {self.charges} charges together"
        if self.planned is None:
            return f"{what} {'has' if one else 'have'} no proven price at delta {self.delta:g}. This does not decide."
        cost = f"{what} {'costs' if one else 'cost'} epsilon {up(self.planned)} at delta {self.delta:g}, certified"
        if self.decides == "plan":
            return f"{cost}. This decided."
        return f"{cost}, if {'it was' if one else 'all were'} chosen before any answer was seen. This does not decide."

    def _claim(self) -> str:
        if not self.charges:
            return "Nothing was spent."
        if not math.isfinite(self.adaptive):
            return f"No epsilon is proven at delta {self.delta:g} for charges chosen one after another."
        claimed = f"Epsilon {up(self.adaptive)} at delta {self.delta:g} may be claimed"
        if self.decides == "plan":
            return f"{claimed}: the plan's certified price."
        if self.delta >= self.budget.delta and self.adaptive >= self.budget.epsilon:
            return (
                f"{claimed}, the whole budget: the filter never lets more through, however each charge is chosen, and"
                f" no smaller number is proven. The budget is not gone for that: {percent(self.left)} of the room is"
                f" left."
            )
        return f"{claimed}, however each charge was chosen after the answers before it."


def planned_epsilon(counts: Mapping[str, collections.Counter[Event]], delta: float) -> float | None:
    """The certified epsilon of every stream's events as one list, where it is largest; None if it has no bound."""
    if not counts:
        return 0.0
    common = counts.get(WHOLE, collections.Counter())
    streams = [common + counter for name, counter in counts.items() if name != WHOLE] or [common]
    wholes = [Composed(Repeated(event, times=times) for event, times in stream.items()) for stream in streams]
    if delta == 0:  # epsilons add up, where every event has one
        costs = [price(whole, (2.0,)) for whole in wholes]
        known = [cost.epsilon for cost in costs if cost.epsilon is not None and not cost.delta]
        return max(shown(one) for one in known) if len(known) == len(costs) else None
    try:
        return max(certified_epsilon(whole, delta=delta) for whole in wholes)
    except (UnsupportedEvent, InvalidArgument):
        return None


def percent(share: float) -> str:
    """A share as it is read out."""
    return f"{100 * share:.3g}%" if share <= 1 else "more than all"


def up(epsilon: float) -> str:
    """An epsilon to four places, never smaller than it is."""
    return "infinity" if math.isinf(epsilon) else _places(math.ceil(epsilon * 1e4) / 1e4)


def down(epsilon: float) -> str:
    """An epsilon to four places, or to three digits if it is small, never larger than it is."""
    if epsilon >= 1e-3:
        return _places(math.floor(epsilon * 1e4) / 1e4)
    scale = 10.0 ** (2 - math.floor(math.log10(epsilon)))
    return f"{math.floor(epsilon * scale) / scale:.3g}"


def _places(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")
