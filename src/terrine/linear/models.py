"""Linear models in front of and behind the statistics: a constant feature, targets of classes, scores of classes.

    row       (sqrt(1 - c^2) x, c)        |x| <= 1, so the constant c = 0.3 costs nothing of the bound
    2 classes one target, +1 or -1        two columns would be the same number twice, and twice the noise
    k classes one target for each, 0 or 1

Least squares on such targets estimate each class's probability given the row, too near the middle where the ridge is
large; shares that come out below 0.001 are raised to it, and all are divided by their sum. That is a public formula,
not a calibration: which class is likeliest is all that is learned well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine.linear.ridge import solve
from terrine.linear.statistics import Floats, Statistics

CONSTANT = 0.3
LEAST = 0.001
"""The smallest share that a class is given."""


@dataclass(frozen=True, eq=False)
class LinearModel:
    """weights (features, outputs) and bias (outputs,), for rows of length at most 1."""

    weights: Floats
    bias: Floats

    def __call__(self, rows: Floats) -> Floats:
        """(n, outputs), of (n, features) rows; longer rows are scaled to length 1, as in training."""
        return np.asarray(bounded(rows) @ self.weights + self.bias)


def bounded(rows: Floats) -> Floats:
    """Each row scaled to length at most 1; one that is not finite becomes zero."""
    found = np.asarray(rows, dtype=np.float64)
    found = np.where(np.isfinite(found).all(axis=1, keepdims=True), found, 0.0)
    largest = np.maximum(np.abs(found).max(axis=1, keepdims=True, initial=0.0), 1.0)
    found = found / largest
    norms = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found / np.where(largest > 1.0, norms, np.maximum(norms, 1.0)))


def with_constant(rows: Floats) -> Floats:
    """The rows, bounded, with the constant feature last; a row that is not finite stays so and adds nothing."""
    found = np.asarray(rows, dtype=np.float64)
    broken = ~np.isfinite(found).all(axis=1)
    wider = np.hstack([math.sqrt(1 - CONSTANT**2) * bounded(found), np.full((len(found), 1), CONSTANT)])
    wider[broken] = np.nan
    return wider


def model(statistics: Statistics, ridge: float | None = None) -> LinearModel:
    """The ridge model of rows that were given `with_constant`."""
    weights = solve(statistics, ridge)
    return LinearModel(math.sqrt(1 - CONSTANT**2) * weights[:-1], CONSTANT * weights[-1])


def outputs(classes: int) -> int:
    """How many targets there are for so many classes."""
    return 1 if classes == 2 else classes


def class_targets(labels: NDArray[np.int64], classes: int) -> Floats:
    """The targets of labels 0 ... classes - 1."""
    if classes == 2:
        return np.asarray(2.0 * labels - 1.0)[:, None]
    return np.asarray(np.eye(classes)[labels])


def class_model(statistics: Statistics, ridge: float | None = None) -> LinearModel:
    """The model whose outputs are the share of each class, before they are cut to `LEAST`."""
    found = model(statistics, ridge)
    if found.weights.shape[1] > 1:
        return found
    signs = np.array([-0.5, 0.5])
    return LinearModel(found.weights * signs, found.bias * signs + 0.5)


def shares(scores: Floats) -> Floats:
    """The outputs of a class model as probabilities."""
    kept = np.maximum(scores, LEAST)
    return np.asarray(kept / kept.sum(axis=1, keepdims=True))
