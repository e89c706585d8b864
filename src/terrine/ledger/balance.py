"""What an account has spent, partition by partition.

Someone in partition p is touched by the charges on p and by those on the whole account, never by those on another
partition: the cost to them is common + own(p), and the account's cost is the largest of these (parallel composition).
Each such sum runs through the account's filter. Under replace-one a unit could move between partitions, so
partitions need add/remove or zero-out neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from terrine import check
from terrine.accounting import filters
from terrine.accounting.costs import Cost, price
from terrine.accounting.filters import Quote, Remaining, Terms
from terrine.errors import InvalidArgument
from terrine.events import Event

WHOLE = ""
"""The stream of charges that touch every partition."""


@dataclass(frozen=True)
class Balance:
    """The running sum of every stream of charges; streams without a charge are left out."""

    terms: Terms
    partitions: tuple[str, ...]
    streams: dict[str, Cost]

    def accept(self, event: Event, partition: str = WHOLE) -> tuple[Cost, Balance] | None:
        """The cost of `event` and the balance after it, or None where it does not fit everywhere it touches."""
        if not self.partitions and partition == WHOLE:  # one stream only: its sum is the balance
            after = filters.accept(self.terms, self.own(WHOLE), event)
            if after is None:
                return None
            cost = price(event, self.terms.orders)
            return replace(cost, planned=True) if after.planned else cost, Balance(self.terms, (), {WHOLE: after})
        sums = [filters.accept(self.terms, one, event) for one in self.touched(partition)]
        accepted = [one for one in sums if one is not None]
        if len(accepted) < len(sums):
            return None
        cost = price(event, self.terms.orders)
        if any(one.planned for one in accepted):
            cost = replace(cost, planned=True)
        return cost, self.plus(cost, partition)

    def plus(self, cost: Cost, partition: str) -> Balance:
        """The balance with `cost` added to one stream."""
        return replace(self, streams={**self.streams, partition: self.own(partition) + cost})

    def own(self, partition: str) -> Cost:
        """What was charged to this stream alone."""
        return self.streams.get(partition) or self.terms.nothing

    def state(self, partition: str) -> tuple[Cost, Cost | None]:
        """What a charge on `partition` leaves behind it: that stream's sum, and the whole account's beside it."""
        return self.own(partition), None if partition == WHOLE else self.own(WHOLE)

    def touched(self, partition: str = WHOLE) -> list[Cost]:
        """The sums that a charge to `partition` would move.

        Raises:
            InvalidArgument: the account has no such partition.
        """
        common = self.own(WHOLE)
        if partition == WHOLE:
            if not self.partitions:
                return [common]
            # Partitions without a charge of their own all stand at `common`: one of them speaks for all.
            own = [cost for name, cost in self.streams.items() if name != WHOLE]
            return [common + cost for cost in own] + ([common] if len(own) < len(self.partitions) else [])
        if partition not in self.partitions:
            known = f"one of {', '.join(self.partitions)}" if self.partitions else "none: the account declared none"
            raise InvalidArgument(
                f"partition={check.shown(partition)}: want {known}; partitions are declared when it is opened"
            )
        return [common + self.own(partition)]

    def used(self) -> float:
        """The share of the budget used where most was spent."""
        return max(self.terms.used(one) for one in self.touched())

    def quote(self, event: Event, partition: str = WHOLE) -> Quote:
        """What `event` would do where it does most."""
        quotes = [filters.quote(self.terms, one, event) for one in self.touched(partition)]
        return Quote(share=max(one.share for one in quotes), fits=all(one.fits for one in quotes))

    def refusal(self, event: Event, partition: str = WHOLE) -> Exception:
        """The error for an event that was not accepted."""
        refused = [one for one in self.touched(partition) if filters.accept(self.terms, one, event) is None]
        return filters.refusal(self.terms, refused[0], event)

    def remaining(self, partition: str = WHOLE) -> Remaining:
        """What is left for one more charge to `partition`."""
        return min((filters.remaining(self.terms, one) for one in self.touched(partition)), key=lambda one: one.epsilon)

    def spent(self, delta: float | None, plan: Event | None) -> float:
        """An epsilon that holds for everyone."""
        return max(filters.spent(self.terms, one, delta=delta, plan=plan) for one in self.touched())


def summed(terms: Terms, partitions: tuple[str, ...], streams: Mapping[str, Cost]) -> Balance:
    """The balance of streams whose sums are known."""
    return Balance(terms, partitions, dict(streams))
