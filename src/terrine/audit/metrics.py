"""How good an attack is: the ROC curve, its area, and its true positives at few false alarms [CCN22].

An average hides what matters: an attack that is sure about one person in a hundred has an area near 1/2. So the
true-positive rate is read at false-positive rates of 1% and 0.1%.

Intervals are bootstrap percentiles [Efr79] over members and non-members; they describe the attack and prove nothing
about epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.audit.scores import Floats, Scores

_CELLS = 2048


@dataclass(frozen=True, eq=False)
class Roc:
    """Every threshold's rates, from naming nobody to naming everybody."""

    false_positive_rate: Floats
    true_positive_rate: Floats

    def auc(self) -> float:
        """The chance that a member scores above a non-member, ties counted half."""
        return float(np.trapezoid(self.true_positive_rate, self.false_positive_rate))

    def at(self, false_positive_rate: float) -> float:
        """The best true-positive rate with at most so many false positives."""
        place = np.searchsorted(self.false_positive_rate, false_positive_rate * (1 + 1e-12), side="right") - 1
        return float(self.true_positive_rate[place])

    def balanced_accuracy(self) -> float:
        """The accuracy of the best threshold, members and non-members weighed alike."""
        return float((1 + (self.true_positive_rate - self.false_positive_rate).max()) / 2)


@dataclass(frozen=True)
class MetricInterval:
    """A number with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """An attack in four numbers."""

    auc: MetricInterval
    at_one_percent: MetricInterval
    at_one_in_thousand: MetricInterval
    balanced_accuracy: MetricInterval


def roc(scores: Scores) -> Roc:
    """The ROC curve of an attack: one corner to a distinct score."""
    levels = np.unique(np.concatenate([scores.members, scores.non_members]))[::-1]
    named = [_above(np.sort(side), levels) / side.size for side in (scores.non_members, scores.members)]
    return Roc(*(np.concatenate([[0.0], one]) for one in named))


def summary(scores: Scores, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0) -> Summary:
    """Area, true positives at 1% and 0.1% false positives, and balanced accuracy, with bootstrap intervals."""
    confidence = check.open_unit("confidence", confidence)
    resamples = check.whole("resamples", resamples, at_least=10)
    point = _numbers(roc(scores))
    drawn = np.array([_numbers(one) for one in _resampled(scores, resamples, np.random.default_rng(seed))])
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return Summary(
        *(
            MetricInterval(value, min(float(a), value), max(float(b), value))
            for value, a, b in zip(point, low, high, strict=True)
        )
    )


def _numbers(curve: Roc) -> tuple[float, float, float, float]:
    return curve.auc(), curve.at(0.01), curve.at(0.001), curve.balanced_accuracy()


def _above(ordered: Floats, levels: Floats) -> Floats:
    """How many are at or above each level."""
    return (ordered.size - np.searchsorted(ordered, levels, side="left")).astype(np.float64)


def _resampled(scores: Scores, resamples: int, generator: np.random.Generator) -> list[Roc]:
    """Curves of resampled scores; large arrays are first gathered in cells, finest among the highest scores."""
    levels = np.unique(np.concatenate([scores.members, scores.non_members]))[::-1]
    if levels.size > _CELLS:
        ranks = np.unique(np.rint(np.geomspace(1, levels.size, _CELLS // 2)).astype(np.int64)) - 1
        evenly = np.linspace(0, levels.size - 1, _CELLS // 2).astype(np.int64)
        levels = levels[np.union1d(ranks, evenly)]
    sides = []
    for side in (scores.non_members, scores.members):
        cells = np.diff(_above(np.sort(side), levels), prepend=0.0)
        counts: NDArray[np.int64] = generator.multinomial(side.size, cells / cells.sum(), size=resamples)
        sides.append(np.concatenate([np.zeros((resamples, 1)), counts.cumsum(axis=1) / side.size], axis=1))
    return [Roc(false, true) for false, true in zip(*sides, strict=True)]
