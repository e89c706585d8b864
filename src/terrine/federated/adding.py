"""One round's sum in this process, by whichever way the plan says: what every engine hands its contributions to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from terrine.federated.drawing import Drawn
from terrine.federated.plan import Plan
from terrine.federated.quantise import Floats, Quantiser, clipped
from terrine.federated.secure.opening import OpenedSum, opened_round, wraparound
from terrine.federated.secure.server import TooFewSurvivors, centred
from terrine.federated.sums import Central
from terrine.mechanisms import grid, lattice
from terrine.rng import Source


def add(
    plan: Plan, drawn: Drawn, updates: Mapping[int, Floats], dimension: int, *, gone: set[int], full: bool, rng: Source
) -> OpenedSum:
    """The noisy sum of the `updates` of clients that were drawn and are not `gone`.

    With `full` every message of the secure sum is made and read; without, whole numbers and their noise are added up
    directly, which gives the same distribution in a fraction of the time.

    Raises:
        TooFewSurvivors: fewer shares of noise are left than the plan's `survivors`; nothing is opened.
    """
    alive = [one for one in drawn.taking_part if one not in gone]
    if isinstance(plan.sums, Central):
        total, moved = exact_sum(plan, updates, dimension), plan.bound * plan.sampling.reach
        chosen = grid.plan(lattice.Shape.GAUSSIAN, grid.Norm.L2, moved, plan.noise, None, dimension, False)
        return OpenedSum(np.asarray(grid.release(chosen, total, rng)), len(alive), 0.0)
    quantiser = Quantiser(dimension, plan.bound, plan.reach, rng.word() >> 1)
    if full:
        zeros = np.zeros(dimension)
        vectors = [updates.get(one, zeros) for one in drawn.taking_part]
        places = {one: place for place, one in enumerate(drawn.taking_part)}
        givers = frozenset(places[one] for one in drawn.giving)
        silent = {places[one] for one in gone if one in places}
        return opened_round(vectors, plan, quantiser, givers, silent, set(), rng)
    return _directly(plan, quantiser, [updates[one] for one in alive if one in updates], drawn, gone, rng)


def exact_sum(plan: Plan, updates: Mapping[int, Floats], dimension: int) -> Floats:
    """The sum of the updates, each clipped, without noise: for the server's eyes only."""
    total = np.zeros(dimension)
    for client in sorted(updates):
        total += clipped(updates[client], plan.bound)
    return total


def _directly(
    plan: Plan, quantiser: Quantiser, updates: Sequence[Floats], drawn: Drawn, gone: set[int], rng: Source
) -> OpenedSum:
    assert not isinstance(plan.sums, Central)
    givers = len(set(drawn.giving) - gone)
    if givers < plan.sums.survivors:
        raise TooFewSurvivors(f"{givers} clients with noise are left, want {plan.sums.survivors}: nothing is opened")
    total = plan.sums.total(quantiser.length, plan.deviation, givers, rng)
    for update in updates:
        total += quantiser.to_integers(update, rng)
    whole = centred((total & 0xFFFFFFFF).astype(np.uint32), plan.sums.bits)
    return OpenedSum(quantiser.to_real(whole), givers, wraparound(whole, plan, len(updates)))
