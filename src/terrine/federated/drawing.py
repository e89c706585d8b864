"""Who takes part in a round: the clients that are drawn, and those that give noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from terrine import check
from terrine.errors import InvalidArgument
from terrine.federated.plan import Plan
from terrine.federated.sampling import MinimumSeparation, PoissonClients
from terrine.mechanisms import exact
from terrine.rng import Source

if TYPE_CHECKING:
    from terrine.common.keys import Key

Turns = dict[int, list[int]]
"""The rounds in which each client took part."""


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


def draw(
    plan: Plan,
    rng: Source,
    *,
    key: Key | None = None,
    round_: int = 0,
    turns: Turns | None = None,
    present: Iterable[int] | None = None,
) -> Drawn:
    """Contributing clients as the plan's sampling has it, and `per_round` noise givers, of whom others stand in.

    `round_` counts from 0; `key` decides the groups and the order of clients. With `MinimumSeparation` those `present`
    are asked (None: all), and `turns` holds earlier rounds' and is written to.
    """
    drawn: list[int]
    if isinstance(plan.sampling, PoissonClients):
        drawn = np.flatnonzero(exact.coins(Fraction(plan.rate), plan.clients, rng)).tolist()
    elif isinstance(plan.sampling, MinimumSeparation):
        drawn = _checked_in(plan, plan.sampling, rng, round_, {} if turns is None else turns, present)
    else:
        assert key is not None
        drawn = plan.sampling.draw(key, round_, examples=plan.clients, lot=plan.per_round).tolist()
    first = [drawn[place] for place in exact.order(len(drawn), rng)][: plan.per_round]
    if len(first) < plan.per_round:
        others = sorted(set(range(plan.clients)) - set(drawn))
        places = exact.order(len(others), rng)[: plan.per_round - len(first)]
        first += [others[place] for place in places]
    return Drawn(tuple(sorted(drawn)), tuple(sorted(first)))


def _checked_in(
    plan: Plan, sampling: MinimumSeparation, rng: Source, round_: int, turns: Turns, present: Iterable[int] | None
) -> list[int]:
    """At most `per_round` of those present, none of whom had a turn too lately or has had all of its turns."""
    allowed = [one for one in _people(plan, present) if _may(sampling, turns.get(one, []), round_)]
    chosen = sorted(allowed[place] for place in exact.order(len(allowed), rng)[: plan.per_round])
    for one in chosen:
        turns.setdefault(one, []).append(round_)
    return chosen


def _people(plan: Plan, present: Iterable[int] | None) -> Sequence[int]:
    if present is None:
        return range(plan.clients)
    found = sorted({check.whole("present", one, at_least=0) for one in present})
    if found and found[-1] >= plan.clients:
        raise InvalidArgument(f"present={found[-1]}: want clients from 0 to {plan.clients - 1}")
    return found


def _may(sampling: MinimumSeparation, before: Sequence[int], round_: int) -> bool:
    far = not before or round_ - before[-1] >= sampling.rounds
    return far and (sampling.turns is None or len(before) < sampling.turns)
