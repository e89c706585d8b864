"""What `PrivateClassifier` and `PrivateRegressor` have in common: a module, a plan and one training.

The number of examples and of features count as public. Nothing else is taken from the data but what the plan pays for:
rows are scaled one by one, never by statistics of the whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import check
from terrine.common import generators
from terrine.common.people import People
from terrine.errors import InvalidArgument, MissingExtra
from terrine.events import Budget
from terrine.receipts import Charged
from terrine.sgd.plan import Plan
from terrine.sgd.trainer import Trainer

try:
    from sklearn.base import BaseEstimator
except ImportError as error:
    raise MissingExtra("scikit-learn", extra="pate") from error


class PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """Trains a module by DP-SGD on rows of numbers."""

    module: nn.Module | Callable[[int, int], nn.Module] | None
    hidden: Sequence[int]
    epsilon: float
    delta: float
    lot: int | None
    epochs: float
    clip: float
    learning_rate: float
    rows_per_group: int
    normalise: bool
    account: Charged | None
    device: str | None
    seed: int | None

    def _train(self, X: NDArray[np.float32], targets: Tensor, outputs: int, loss: nn.Module, groups: Any) -> None:
        self.module_ = self._module(X.shape[1], outputs)
        self._check_module(X.shape[1], outputs)
        people = None if groups is None else len(People(groups, len(X)))
        self.plan_ = Plan(
            examples=len(X) if people is None else None,
            people=people,
            rows_per_person=None if people is None else self.rows_per_group,
            lot=max(1, (people or len(X)) // 20) if self.lot is None else self.lot,
            epochs=self.epochs,
            clip=self.clip,
            budget=Budget(epsilon=self.epsilon, delta=self.delta),
            seed=self.seed,
        )
        rate = check.positive("learning_rate", self.learning_rate)
        optimizer = torch.optim.SGD(self.module_.parameters(), lr=rate)
        trainer = Trainer(
            self.module_, optimizer, loss, self.plan_, account=self.account, device=self.device, progress=False
        )
        history = trainer.fit((self._inputs(X), targets), person=groups, purpose=type(self).__name__)
        self.module_.cpu()
        self.epsilon_, self.event_ = self.plan_.epsilon, self.plan_.event
        self.n_iter_, self.history_ = self.plan_.steps, history

    def _inputs(self, X: NDArray[np.float32]) -> Tensor:
        rows = torch.from_numpy(np.ascontiguousarray(X))
        return nn.functional.normalize(rows, dim=1) if self.normalise else rows

    def _module(self, features: int, outputs: int) -> nn.Module:
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        with generators.untouched() if self.seed is not None else nullcontext():
            if self.seed is not None:
                torch.manual_seed(self.seed)
            if self.module is not None:
                return self.module(features, outputs)
            widths = [features, *self.hidden]
            layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
            return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    @torch.no_grad()
    def _check_module(self, features: int, outputs: int) -> None:
        """A module of other outputs would give probabilities for classes that there are not."""
        home = next((one.device for one in self.module_.parameters()), None)
        found = tuple(copy.deepcopy(self.module_).eval()(torch.zeros(1, features, device=home)).shape)
        if found != (1, outputs):
            what = "one number for each class" if outputs > 1 else "the number that is predicted"
            raise InvalidArgument(f"module: gives shape {found} for one row; want (1, {outputs}), {what}")

    def __sklearn_is_fitted__(self) -> bool:
        """Whether a fit has come to its end."""
        return hasattr(self, "history_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.seed is None
        return tags
