"""A scikit-learn regressor trained by DP-SGD, for a number within public bounds.

    PrivateRegressor(bounds=(0, 300), epsilon=1.0, delta=1e-5).fit(X, y).score(X_test, y_test)

The bounds are known without the rows: targets outside are moved to the nearer bound, and so are predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from terrine.errors import MissingExtra
from terrine.receipts import Charged
from terrine.sgd.estimator import PrivateEstimator
from terrine.sgd.targets import NumberLoss, TargetBounds

try:
    from sklearn.base import RegressorMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", extra="pate") from error


class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """A regressor whose training costs at most (epsilon, delta).

    `loss` is "squared" or "absolute", of targets scaled from `bounds` to [-1, 1]. Everything else is as in
    `PrivateClassifier`; a `module` has one output.

    Guarantee: `fit` costs at most `plan_.event`, certified as (`epsilon_`, `delta`); the account is charged first.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        bounds: tuple[float, float] | None = None,
        loss: str = "squared",
        hidden: Sequence[int] = (),
        epsilon: float = 1.0,
        delta: float = 1e-5,
        lot: int | None = None,
        epochs: float = 20,
        clip: float = 1.0,
        learning_rate: float = 0.5,
        rows_per_group: int = 10,
        normalise: bool = True,
        account: Charged | None = None,
        device: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.module, self.bounds, self.loss, self.hidden = module, bounds, loss, hidden
        self.epsilon, self.delta = epsilon, delta
        self.lot, self.epochs, self.clip, self.learning_rate = lot, epochs, clip, learning_rate
        self.normalise, self.account, self.seed = normalise, account, seed
        self.device, self.rows_per_group = device, rows_per_group

    def fit(self, X: Any, y: Any, *, groups: Any = None) -> PrivateRegressor:
        """Train on rows `X` with numbers `y`; with `groups`, an id for every row, people are protected.

        Raises:
            InvalidArgument: there are no bounds, or a setting is out of range or does not fit the data.
            BudgetExceeded: the account has not enough left; nothing was trained.
        """
        self.__dict__.pop("history_", None)
        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        targets = torch.from_numpy(TargetBounds.given(self.bounds).scaled(y).astype(np.float32))
        self._train(X, targets, 1, NumberLoss(self.loss), groups)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """A number within the bounds for each row."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float32, reset=False)
        with torch.no_grad():
            told = self.module_(self._inputs(rows)).double().numpy()[:, 0]
        return TargetBounds.given(self.bounds).unscaled(told)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # at the default epsilon, on the checks' tiny data sets
        return tags
