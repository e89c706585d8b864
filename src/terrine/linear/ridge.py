"""Ridge regression from noisy statistics: (A + ridge I)^-1 B, where what is negative in A can only be noise.

How large the ridge is, is found without another look at the rows. Fresh noise G of the same size splits a release in
two that are independent of each other: A + G and A - G (data thinning of a Gaussian). A model of one half is measured
by the loss w^T A w - 2 w^T B of the other, without A's negative part, and the ridge that is best there is taken. It
is a share of what the eigenvalues of the noise in A reach, sqrt(2 d) times its deviation (Wigner's semicircle).

All of this is a post-processing of the release.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from terrine.linear.statistics import Floats, Statistics

SHARES = (0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Of the reach of the noise's eigenvalues, what ridges are tried."""
_SPLITS, _SPLITS_OF_LARGE, _LARGE = 4, 1, 500


def solve(statistics: Statistics, ridge: float | None = None) -> Floats:
    """(features, targets): the weights of the ridge model; any statistics have one, singular ones too."""
    return _solved(statistics, [strength(statistics) if ridge is None else ridge])[0]


def strength(statistics: Statistics) -> float:
    """The ridge that is best on halves of the release."""
    least = 1e-6 * statistics.units
    if statistics.deviation <= 0:
        return least
    reach = statistics.deviation * math.sqrt(2 * len(statistics.second))
    ridges = [share * reach for share in SHARES]
    fresh, losses = np.random.default_rng(0), np.zeros(len(ridges))  # independent of the release: from the system
    for _ in range(_SPLITS if len(statistics.second) <= _LARGE else _SPLITS_OF_LARGE):
        first, second = _split(statistics, fresh)
        for fit, test in ((first, second), (second, first)):
            models = _solved(fit, [math.sqrt(2) * one for one in ridges])
            losses += _losses(test, models)
    return max(ridges[int(losses.argmin())], least)


def _solved(statistics: Statistics, ridges: Sequence[float]) -> list[Floats]:
    values, vectors = np.linalg.eigh(statistics.second)
    turned, kept = vectors.T @ statistics.cross, np.maximum(values, 0.0)
    return [np.asarray(vectors @ (turned / (kept + one)[:, None])) for one in ridges]


def _split(statistics: Statistics, fresh: np.random.Generator) -> tuple[Statistics, Statistics]:
    """Two halves with twice the noise's variance, each independent of the other's noise."""
    width, deviation = len(statistics.second), statistics.deviation
    drawn = fresh.normal(size=(width, width)) * deviation / math.sqrt(2)
    noise = np.triu(drawn, 1)
    noise = noise + noise.T + np.diag(fresh.normal(size=width) * deviation)
    beside = fresh.normal(size=statistics.cross.shape) * statistics.cross_deviation
    more, cross = math.sqrt(2) * deviation, math.sqrt(2) * statistics.cross_deviation
    first, second = (
        Statistics(statistics.second + sign * noise, statistics.cross + sign * beside, more, cross, statistics.units)
        for sign in (1, -1)
    )
    return first, second


def _losses(statistics: Statistics, models: Sequence[Floats]) -> Floats:
    """The squared loss of models, but for what no model changes; negative squares can only be noise and count as 0."""
    values, vectors = np.linalg.eigh(statistics.second)
    kept, turned = np.maximum(values, 0.0), vectors.T @ statistics.cross
    found = []
    for weights in models:
        along = vectors.T @ weights
        found.append(float((kept @ along**2).sum() - 2 * np.sum(along * turned)))
    return np.array(found)
