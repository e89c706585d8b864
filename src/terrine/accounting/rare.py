"""Rare large losses taken out of a composition, exactly: what is left has one scale, and the inversion suits it.

With few steps and small rates a loss is either tiny, or, seldom, large. Let A be "some step's loss exceeds t". Where
t is so far above epsilon that the other steps cannot make up for it, L > epsilon on A, and

    delta(e) = E_P[(1 - e^(e-L))_+] = P(A) - e^e Q(A) + E_P[(1 - e^(e-L))_+ ; not A].

The last term is that of losses cut off at t; with P(A) counted as escaped, only e^e Q(A) is left to be taken away, by
Q's part where P is not 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from terrine.accounting.independent import Composition, Part
from terrine.accounting.loss_distribution import Losses

_ROOM = 2.0
"""How far above the least possible t it stands."""
_MOST_STEPS = 10_000
"""With more, the slack in Q(A) would be too much."""


class Apart(NamedTuple):
    """A composition without its large losses, which count as escaped, and Q(A), rounded down and up."""

    rest: Composition
    least: float
    most: float


def apart(composition: Composition, epsilon: float) -> Apart | None:
    """The large losses taken out, for every epsilon up to this one; None where there are none, or no cut is safe."""
    times = sum(part.times for part in composition.parts)
    on_atoms = not any(part.losses.nodes for part in composition.parts)
    if composition.gaussian + composition.lattice > 0 or not on_atoms or times > _MOST_STEPS:
        return None
    lowest = sum(part.times * min(0.0, float(part.losses.loss.min())) for part in composition.parts)
    cut = _ROOM * (epsilon - lowest)
    parts, log_all, log_small = [], 0.0, 0.0
    for part in composition.parts:
        losses = part.losses
        large = losses.loss > cut
        if large.all():
            return None
        taken = losses.escaped + float(losses.mass[large].sum()) * (1 + 1e-12)
        parts.append(Part(Losses(losses.loss[~large], losses.mass[~large], taken), part.times))
        seen = losses.mass * np.exp(-losses.loss)  # by Q, where P is not 0
        whole = float(seen.sum())
        log_all += part.times * math.log(whole)
        log_small += part.times * math.log1p(-float(seen[large].sum()) / whole)
    chance = math.exp(log_all) * -math.expm1(log_small)
    slack = 1e-12 * (100 + 4 * times)  # every step's sums are rounded
    return Apart(Composition(tuple(parts)), chance * (1 - slack), chance * (1 + slack)) if log_small < 0 else None
