"""Who takes part in a round: the clients that are drawn, and those that give noise."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from terrine.federated.plan import Plan
from terrine.mechanisms import exact
from terrine.rng import Source


@dataclass(frozen=True)
class Drawn:
    """One round's clients. Who was drawn is not to be told: the bill counts on that."""

    contributing: tuple[int, ...]
    """Drawn with the plan's rate: they send an update."""
    giving: tuple[int, ...]
    """Always `per_round`: they add a share of noise, whether they were drawn or stand in."""

    @property
    def taking_part(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted({*self.contributing, *self.giving}))


def draw(plan: Plan, rng: Source) -> Drawn:
    """Every client independently; noise givers at random among those drawn, and others where they are too few."""
    flags = exact.coins(Fraction(plan.rate), plan.clients, rng)
    drawn = [int(one) for one in np.flatnonzero(flags)]
    first = [drawn[place] for place in exact.order(len(drawn), rng)][: plan.per_round]
    if len(first) < plan.per_round:
        others = [int(one) for one in np.flatnonzero(~flags)]
        places = exact.order(len(others), rng)[: plan.per_round - len(first)]
        first += [others[place] for place in places]
    return Drawn(tuple(drawn), tuple(sorted(first)))
