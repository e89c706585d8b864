"""Shadow models with an attack model: learn what members look like where membership is known [SSSS17].

From every shadow's outputs on examples it did and did not see, one logistic regression to a class learns to tell
them apart; it is then asked about the target's outputs. Features: the highest three log-probabilities, the label's
own, and whether the prediction is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

from terrine.audit import attacks
from terrine.audit.scores import Floats
from terrine.errors import InvalidArgument

_RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class AttackModel:
    """One logistic regression to a class, on standardised features."""

    centre: Floats = field(repr=False)
    scale: Floats = field(repr=False)
    weights: Floats = field(repr=False)
    """(classes, features + 1), the last one the intercept."""

    def score(self, logits: ArrayLike, labels: ArrayLike) -> Floats:
        """The log odds that each example was a member, judging by the target's logits (examples, classes)."""
        features = (_features(logits, labels) - self.centre) / self.scale
        chosen = self.weights[np.asarray(labels)]
        result: Floats = (features * chosen[:, :-1]).sum(axis=1) + chosen[:, -1]
        return result


def fit(logits: ArrayLike, labels: ArrayLike, included: ArrayLike) -> AttackModel:
    """Learn from shadows: logits (models, examples, classes), labels (examples,), included (models, examples).

    Raises:
        InvalidArgument: shapes differ, or the shadows saw everything or nothing.
    """
    table, flags = np.asarray(logits, dtype=np.float64), np.asarray(included, dtype=np.bool_)
    if table.ndim != 3 or flags.shape != table.shape[:2]:
        raise InvalidArgument(
            f"logits {table.shape}, included {flags.shape}: want (models, examples, classes) and flags"
        )
    if flags.all() or not flags.any():
        raise InvalidArgument("included: one kind only; want shadows that saw some examples and not others")
    every = np.tile(np.asarray(labels), len(table))
    features = np.concatenate([_features(one, labels) for one in table])
    centre, scale = features.mean(axis=0), features.std(axis=0) + 1e-9
    features, truth = (features - centre) / scale, flags.ravel()
    general = _logistic(features, truth)
    weights = [
        _logistic(features[rows], truth[rows]) if _both(truth[rows := every == one]) else general
        for one in range(table.shape[2])
    ]
    return AttackModel(centre, scale, np.stack(weights))


def _both(truth: NDArray[np.bool_]) -> bool:
    return bool(truth.any() and not truth.all())


def _features(logits: ArrayLike, labels: ArrayLike) -> Floats:
    table = np.asarray(logits, dtype=np.float64)
    own = attacks.loss(table, labels)
    highest = -np.sort(-log_softmax(table, axis=-1), axis=-1)[:, :3]
    right = (table.argmax(axis=-1) == np.asarray(labels)).astype(np.float64)
    return np.column_stack(
        [np.maximum(highest, -40.0), np.maximum(own, -40.0), attacks.confidence(table, labels), right]
    )


def _logistic(features: Floats, truth: NDArray[np.bool_]) -> Floats:
    design = np.column_stack([features, np.ones(len(features))])
    sign = np.where(truth, 1.0, -1.0)

    def objective(weights: Floats) -> tuple[float, Floats]:
        agreement = sign * (design @ weights)
        gradient = -(design * (sign * expit(-agreement))[:, None]).mean(axis=0) + _RIDGE * weights
        return float(np.logaddexp(0, -agreement).mean() + _RIDGE / 2 * (weights @ weights)), gradient

    found = minimize(objective, np.zeros(design.shape[1]), jac=True, method="L-BFGS-B")
    result: Floats = found.x
    return result
