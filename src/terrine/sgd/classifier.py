"""A scikit-learn classifier trained by DP-SGD: linear, an MLP, or any module.

    PrivateClassifier(classes=[0, 1], epsilon=1.0, delta=1e-5).fit(X, y).score(X_test, y_test)

The number of examples and of features count as public. The classes do not: they are given, and a label outside them is
refused. Nothing else is taken from the data but what the plan pays for: rows are scaled one by one, never by
statistics of the whole.
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
from terrine.sgd.targets import placed, told

try:
    from sklearn.base import ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", extra="pate") from error


class PrivateClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """A classifier whose training costs at most (epsilon, delta).

    `classes` are all labels that may occur, or "public" where those that do occur are public knowledge. `module` is a
    module to copy, a function (features, classes) -> module, or None for a linear model or, with `hidden`, an MLP with
    bounded activations. `normalise` scales each row to norm 1. It trains on `device`.

    Guarantee: `fit` costs at most `plan_.event`, certified as (`epsilon_`, `delta`); the account is charged first.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: Sequence[int] = (),
        epsilon: float = 1.0,
        delta: float = 1e-5,
        lot: int | None = None,
        epochs: float = 20,
        clip: float = 1.0,
        learning_rate: float = 2.0,
        rows_per_group: int = 10,
        normalise: bool = True,
        classes: ArrayLike | None = None,
        account: Charged | None = None,
        device: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.module, self.hidden = module, hidden
        self.epsilon, self.delta = epsilon, delta
        self.lot, self.epochs, self.clip, self.learning_rate = lot, epochs, clip, learning_rate
        self.normalise, self.classes, self.account, self.seed = normalise, classes, account, seed
        self.device, self.rows_per_group = device, rows_per_group

    def fit(self, X: Any, y: Any, *, groups: Any = None) -> PrivateClassifier:
        """Train on rows `X` with labels `y`; where that is refused, nothing is fitted.

        With `groups`, an id for every row that is equal for rows of one person, people are protected: each counts with
        the mean over at most `rows_per_group` of its rows.

        Raises:
            InvalidArgument: nobody says which classes there are, a setting is out of range, or does not fit the data.
            BudgetExceeded: the account has not enough left; nothing was trained.
        """
        self.__dict__.pop("history_", None)
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_ = told(self.classes, y)
        places = torch.from_numpy(placed(self.classes_, y))
        self._train(X, places, len(self.classes_), nn.CrossEntropyLoss(reduction="none"), groups)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The probability of each class, in the order of `classes_`."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float32, reset=False)
        with torch.no_grad():
            shares: NDArray[np.float64] = self.module_(self._inputs(rows)).double().softmax(dim=1).numpy()
        return shares

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The likeliest class of each row."""
        shares = self.predict_proba(X)
        return np.asarray(self.classes_[shares.argmax(axis=1)])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # at the default epsilon, on the checks' tiny data sets
        return tags
