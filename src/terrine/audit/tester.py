"""A black box against its claim: run it on two neighbours, and bound its epsilon from below.

For every set S of outcomes, an (epsilon, delta)-DP mechanism has P(S) <= e^epsilon P'(S) + delta, so

    epsilon >= ln((P(S) - delta) / P'(S)).

The first half of the runs picks S: outcomes (numbers are first cut into bins) in order of how much likelier they are
under one input, as many of them as give the best bound. The second half, untouched until then, gives Clopper-Pearson
bounds on both probabilities. So with probability at least `confidence` the bound is below the true epsilon, whatever
the mechanism does; a bound above the claim refutes the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from terrine import check
from terrine.errors import InvalidArgument

Labels = NDArray[np.intp]


@dataclass(frozen=True)
class LowerBound:
    """What the runs proved: epsilon at `delta` is at least `epsilon`, with `confidence`."""

    epsilon: float
    delta: float
    confidence: float
    trials: int

    def refutes(self, claim: float) -> bool:
        """Whether a claimed epsilon is too small to be true."""
        return self.epsilon > claim


def lower_bound(
    mechanism: Callable[[Any, int], Sequence[Any] | NDArray[Any]],
    first: Any,
    second: Any,
    *,
    trials: int = 100_000,
    delta: float = 0.0,
    confidence: float = 1 - 1e-6,
    bins: int = 256,
) -> LowerBound:
    """A lower bound on the epsilon of `mechanism` at `delta`, from `trials` runs on each of two neighbouring inputs.

    `mechanism(value, count)` runs `count` times and returns the outcomes: numbers, or anything hashable (a row of an
    array counts as one outcome). `first` and `second` must be neighbours under the relation of the claim.

    Raises:
        InvalidArgument: too few trials, or a mechanism that returned another number of outcomes.
    """
    trials = check.whole("trials", trials, at_least=100)
    delta = check.half_open_unit("delta", delta)
    confidence = check.open_unit("confidence", confidence)
    runs = [_collect(mechanism, value, trials) for value in (first, second)]
    half = trials // 2
    labels, count = _labels(runs, half, check.whole("bins", bins, at_least=2))
    chance = (1 - confidence) / 4  # two directions, two probabilities each
    best = 0.0
    for this, other in ((0, 1), (1, 0)):
        chosen = _choose(labels[this][:half], labels[other][:half], count, delta)
        mine = int(chosen[labels[this][half:]].sum())
        yours = int(chosen[labels[other][half:]].sum())
        best = max(best, _bound(mine, yours, trials - half, delta, chance))
    return LowerBound(best, delta, confidence, trials)


def _collect(mechanism: Callable[[Any, int], Any], value: Any, trials: int) -> NDArray[Any]:
    outcomes = mechanism(value, trials)
    array = outcomes if isinstance(outcomes, np.ndarray) else _as_array(outcomes)
    if len(array) != trials:
        raise InvalidArgument(f"mechanism: {len(array)} outcomes for {trials} runs; want one outcome per run")
    if array.ndim > 1:
        array = np.array([row.tobytes() for row in np.ascontiguousarray(array)], dtype=object)
    return array


def _as_array(outcomes: Any) -> NDArray[Any]:
    listed = list(outcomes)
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in listed):
        return np.array(listed, dtype=np.float64)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array


def _labels(runs: list[NDArray[Any]], half: int, bins: int) -> tuple[list[Labels], int]:
    """Outcomes as small numbers; every cut is made from the first halves."""
    if all(run.dtype.kind in "iuf" for run in runs):
        seen = np.concatenate([run[:half] for run in runs])
        cuts = np.unique(seen)
        if cuts.size > bins:
            cuts = np.unique(np.quantile(seen, np.linspace(0, 1, bins), method="lower"))
        return [np.searchsorted(cuts, run, side="right") for run in runs], cuts.size + 1
    names: dict[Any, int] = {}
    for run in runs:
        for one in run[:half].tolist():
            names.setdefault(one, len(names))
    other = len(names)
    return [np.array([names.get(one, other) for one in run.tolist()], dtype=np.intp) for run in runs], other + 1


def _choose(mine: Labels, yours: Labels, count: int, delta: float) -> NDArray[np.bool_]:
    """The set of labels with the best bound on these runs, labels taken in order of likelihood ratio."""
    here = np.bincount(mine, minlength=count).astype(np.float64)
    there = np.bincount(yours, minlength=count).astype(np.float64)
    order = np.argsort(-(here + 0.5) / (there + 0.5), kind="stable")
    heres, theres = np.cumsum(here[order]), np.cumsum(there[order])
    best, kept = -math.inf, 1
    for size in range(1, count):
        found = _bound(int(heres[size - 1]), int(theres[size - 1]), mine.size, delta, 0.001)
        if found > best:
            best, kept = found, size
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[order[:kept]] = True
    return chosen


def _bound(mine: int, yours: int, total: int, delta: float, chance: float) -> float:
    least = float(betaincinv(mine, total - mine + 1, chance)) if mine else 0.0
    most = float(betaincinv(yours + 1, total - yours, 1 - chance)) if yours < total else 1.0
    return math.log((least - delta) / most) if least > delta else 0.0
