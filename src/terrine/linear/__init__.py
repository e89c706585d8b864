"""Linear models from one noisy release of their sufficient statistics: ridge regression and least-squares classes.

    model = linear.PrivateRidge(bounds=(0, 300), epsilon=1.0, delta=1e-5).fit(X, y)
    classes = linear.PrivateRidgeClassifier(classes=[0, 1], epsilon=1.0, delta=1e-5).fit(X, y)

    statistics    what is released, and what one row or person can move it by
    ridge         the model that follows from it, with a ridge that knows the noise
    models        targets and features in front of it
    estimators    the same as scikit-learn's estimators

One release, no iterations: fast, and better than DP-SGD where rows times epsilon is small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrine.linear.ridge import solve, strength
from terrine.linear.statistics import LARGEST_WIDTH, Statistics, StatisticsPlan

if TYPE_CHECKING:
    from terrine.linear.estimators import PrivateRidge, PrivateRidgeClassifier

__all__ = [
    "LARGEST_WIDTH",
    "PrivateRidge",
    "PrivateRidgeClassifier",
    "Statistics",
    "StatisticsPlan",
    "solve",
    "strength",
]


def __getattr__(name: str) -> Any:
    if name in ("PrivateRidge", "PrivateRidgeClassifier"):  # the only part that needs scikit-learn
        from terrine.linear import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
