"""DP-SGD on any PyTorch model: one plan makes the lots, the noise and the event.

    plan = sgd.Plan(examples=60_000, lot=600, epochs=20, clip=1.0, budget=Budget(epsilon=2.0, delta=1e-5))
    model, optimizer, lots = sgd.make_private(model, optimizer, dataset, plan)
    for x, y in lots:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

`Trainer` is the same without a loop of one's own, `PrivateClassifier` and `PrivateRegressor` are it for scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrine.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra("torch", extra="torch") from error

from terrine.sgd.averaging import Average
from terrine.sgd.clipping import Automatic, Flat, PerLayer, clipped_sum
from terrine.sgd.correlated import Banded
from terrine.sgd.layers import fix, validate
from terrine.sgd.optimizers import CorrectedAdam
from terrine.sgd.plan import Plan
from terrine.sgd.private import make_private
from terrine.sgd.sampling import FixedSize, Poisson, Shuffled
from terrine.sgd.schedules import Adaptive, Stages
from terrine.sgd.separation import CyclicPoisson, FixedOrder
from terrine.sgd.training import Trainer
from terrine.sgd.validation import Budgeted, PublicValidation

if TYPE_CHECKING:
    from terrine.sgd.classifier import PrivateClassifier
    from terrine.sgd.regressor import PrivateRegressor

__all__ = [
    "Adaptive",
    "Automatic",
    "Average",
    "Banded",
    "Budgeted",
    "CorrectedAdam",
    "CyclicPoisson",
    "FixedOrder",
    "FixedSize",
    "Flat",
    "PerLayer",
    "Plan",
    "Poisson",
    "PrivateClassifier",
    "PrivateRegressor",
    "PublicValidation",
    "Shuffled",
    "Stages",
    "Trainer",
    "clipped_sum",
    "fix",
    "make_private",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "PrivateClassifier":  # the only part that needs scikit-learn
        from terrine.sgd.classifier import PrivateClassifier

        return PrivateClassifier
    if name == "PrivateRegressor":
        from terrine.sgd.regressor import PrivateRegressor

        return PrivateRegressor
    raise AttributeError(f"module 'terrine.sgd' has no attribute {name!r}")
