"""scikit-learn estimators trained by DP-SGD: linear, an MLP, or any module.

    PrivateClassifier(classes=[0, 1], epsilon=1.0, delta=1e-5).fit(X, y).score(X_test, y_test)
    PrivateRegressor(bounds=(0, 300), epsilon=1.0, delta=1e-5).fit(X, y).score(X_test, y_test)

The number of examples and of features count as public. The classes, or the bounds of a number, do not: they are given,
a label outside the classes is refused, targets outside the bounds are moved to the nearer one, and so are predictions.
Nothing else is taken from the data but what the plan pays for: rows are scaled one by one, never by statistics of the
whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from terrine import check
from terrine.common import generators
from terrine.common.people import People
from terrine.common.targets import NumberLoss, TargetBounds, placed, told
from terrine.errors import InvalidArgument, MissingExtra
from terrine.events import Budget
from terrine.receipts import Charged
from terrine.sgd.loss import Loss
from terrine.sgd.plan import Plan
from terrine.sgd.trainer import Trainer

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
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

    def _train(self, X: NDArray[np.float32], targets: Tensor, outputs: int, loss: Loss, groups: Any) -> None:
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


class PrivateClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """A classifier whose training costs at most (epsilon, delta).

    `classes` are all labels that may occur, or "public" where those that do occur are public knowledge. `module` is a
    module to copy, a function (features, classes) -> module, or None for a linear model or, with `hidden`, an MLP with
    bounded activations. `loss` is a criterion, or a function of (module, batch) for a batch (x, y) of one, where y is
    the place of the label among the classes; None is cross entropy. `normalise` scales each row to norm 1. It trains
    on `device`.

    Guarantee: `fit` costs at most `plan_.event`, certified as (`epsilon_`, `delta`); the account is charged first.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        loss: Loss | None = None,
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
        self.module, self.loss, self.hidden = module, loss, hidden
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
        loss = nn.CrossEntropyLoss() if self.loss is None else self.loss
        self._train(X, places, len(self.classes_), loss, groups)
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


class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """A regressor whose training costs at most (epsilon, delta).

    `loss` is "squared" or "absolute", or as in `PrivateClassifier`, of targets scaled from `bounds` to [-1, 1].
    Everything else is as there; a `module` has one output.

    Guarantee: `fit` costs at most `plan_.event`, certified as (`epsilon_`, `delta`); the account is charged first.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        bounds: tuple[float, float] | None = None,
        loss: str | Loss = "squared",
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
        loss = NumberLoss(self.loss) if isinstance(self.loss, str) else self.loss
        self._train(X, targets, 1, loss, groups)
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
