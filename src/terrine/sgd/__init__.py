"""DP-SGD on any PyTorch model: one plan makes the lots, the noise and the event.

    plan = sgd.Plan(examples=60_000, lot=600, epochs=20, clip=1.0, budget=Budget(epsilon=2.0, delta=1e-5))
    for step in sgd.private_steps(model, optimizer, dataset, plan, loss=nn.CrossEntropyLoss()):
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

from terrine.common.correlated import Banded
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping import Automatic, Flat, PerLayer, clipped_sum
from terrine.sgd.layers import fix, validate
from terrine.sgd.metrics import Budgeted, Metric, PublicValidation
from terrine.sgd.optimizers import Average, CorrectedAdam
from terrine.sgd.plan import Adaptive, Plan, Stages
from terrine.sgd.run import PrivateStep, PrivateSteps
from terrine.sgd.sampling import CyclicPoisson, FixedOrder, FixedSize, Poisson, Shuffled
from terrine.sgd.steps import private_steps
from terrine.sgd.trainer import Trainer

if TYPE_CHECKING:
    from terrine.sgd.sklearn import PrivateClassifier, PrivateRegressor

__all__ = [
    "Adaptive",
    "Automatic",
    "Average",
    "Banded",
    "Budgeted",
    "Checkpoint",
    "CorrectedAdam",
    "CyclicPoisson",
    "FixedOrder",
    "FixedSize",
    "Flat",
    "Metric",
    "PerLayer",
    "Plan",
    "Poisson",
    "PrivateClassifier",
    "PrivateRegressor",
    "PrivateStep",
    "PrivateSteps",
    "PublicValidation",
    "Shuffled",
    "Stages",
    "Trainer",
    "clipped_sum",
    "fix",
    "private_steps",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "PrivateClassifier":  # the only part that needs scikit-learn
        from terrine.sgd.sklearn import PrivateClassifier

        return PrivateClassifier
    if name == "PrivateRegressor":
        from terrine.sgd.sklearn import PrivateRegressor

        return PrivateRegressor
    raise AttributeError(f"module 'terrine.sgd' has no attribute {name!r}")
