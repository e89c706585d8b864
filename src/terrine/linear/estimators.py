"""Linear models from one noisy release, as scikit-learn's estimators.

    PrivateRidge(bounds=(0, 300), epsilon=1.0).fit(X, y)
    PrivateRidgeClassifier(classes=[0, 1], epsilon=1.0).fit(X, y)

What one release pays for is all that is learned: there are no iterations, no learning rate and no lots. Bounds and
classes are public facts, given by the caller and never taken from the rows; the number of rows, or people, is public.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import accounting, check
from terrine.common.keys import Key
from terrine.common.people import People
from terrine.common.targets import TargetBounds, placed, told
from terrine.errors import InvalidArgument, MissingExtra
from terrine.events import Budget, Event, Gaussian, Neighbours, Reproducible, Unit
from terrine.linear import models
from terrine.linear.statistics import Floats, Statistics, StatisticsPlan
from terrine.receipts import Charged, Payment
from terrine.rng import SYSTEM, Seeded

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", extra="pate") from error


class _OneRelease(BaseEstimator):  # type: ignore[misc]
    """What both have in common: rows, the release and its bill."""

    epsilon: float
    delta: float
    data_norm: float | None
    ridge: float | None
    rows_per_group: int
    account: Charged | None
    seed: int | None

    def _released(self, rows: Floats, targets: Floats, groups: Any) -> Statistics:
        people = None if groups is None else People(groups, len(rows))
        shares = None
        if people is not None:
            key = Key.fresh() if self.seed is None else Key.seeded(self.seed)
            shares = people.whole_shares(check.whole("rows_per_group", self.rows_per_group), key)
        wider = models.with_constant(rows)
        self.plan_ = StatisticsPlan(
            units=len(rows) if people is None else len(people), features=wider.shape[1], targets=targets.shape[1],
            noise=accounting.calibrate(lambda noise: self._event(noise, people), Budget(self.epsilon, self.delta)),
            unit=None if people is None else Unit.PERSON,
        )  # fmt: skip
        self.event_ = self._event(self.plan_.noise, people)
        self.epsilon_ = accounting.epsilon(self.event_, delta=self.delta)
        Payment(self.account, type(self).__name__).charge(self.event_)
        source = SYSTEM if self.seed is None else Seeded(self.seed)
        return self.plan_.release(wider, targets, shares=shares, rng=source).value

    def _event(self, noise: float, people: People | None) -> Event:
        unit = None if people is None else Unit.PERSON
        event = Gaussian(noise=noise, neighbours=Neighbours.ADD_REMOVE, unit=unit)
        return event if self.seed is None else Reproducible(event)

    def _rows(self, X: NDArray[np.float64]) -> Floats:
        """Rows of length at most 1: each scaled to length 1, or all divided by `data_norm`."""
        if self.data_norm is not None:
            return np.asarray(X / check.positive("data_norm", self.data_norm))
        found = models.bounded(X)
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        return np.asarray(found / np.where(lengths > 0, lengths, 1.0))

    def _ridge(self) -> float | None:
        return None if self.ridge is None else check.positive("ridge", self.ridge)

    def __sklearn_is_fitted__(self) -> bool:
        """Whether a fit has come to its end."""
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.seed is None
        return tags


class PrivateRidge(RegressorMixin, _OneRelease):  # type: ignore[misc]
    """Ridge regression of a number within public `bounds`, from one release that costs at most (epsilon, delta).

    Targets outside the bounds are moved to the nearer one, and so are predictions. Rows are scaled to length 1, or
    divided by `data_norm`, a public bound of their lengths, and cut there. `ridge` is chosen from the release unless
    given.

    Guarantee: `fit` costs at most `event_`, certified as (`epsilon_`, `delta`); the account is charged first.
    """

    def __init__(
        self,
        *,
        bounds: tuple[float, float] | None = None,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        data_norm: float | None = None,
        ridge: float | None = None,
        rows_per_group: int = 10,
        account: Charged | None = None,
        seed: int | None = None,
    ) -> None:
        self.bounds, self.epsilon, self.delta, self.data_norm = bounds, epsilon, delta, data_norm
        self.ridge, self.rows_per_group, self.account, self.seed = ridge, rows_per_group, account, seed

    def fit(self, X: Any, y: Any, *, groups: Any = None) -> PrivateRidge:
        """Learn from rows `X` and numbers `y`; with `groups`, an id for every row, people are protected.

        Raises:
            InvalidArgument: there are no bounds, or a setting is out of range.
            BudgetExceeded: the account has not enough left; nothing was released.
        """
        self.__dict__.pop("model_", None)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        scale, ridge = TargetBounds.given(self.bounds), self._ridge()
        self.model_ = models.model(self._released(self._rows(X), scale.scaled(y)[:, None], groups), ridge)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """A number within the bounds for each row."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float64, reset=False)
        return TargetBounds.given(self.bounds).unscaled(self.model_(self._rows(rows))[:, 0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # at the default epsilon, on the checks' tiny data sets
        return tags


class PrivateRidgeClassifier(ClassifierMixin, _OneRelease):  # type: ignore[misc]
    """Least-squares classes from one release that costs at most (epsilon, delta).

    `classes` are public: a list of them, or "public" where the labels that occur are public knowledge. Probabilities
    are scores cut at 0.001 and divided by their sum: not calibrated.

    Guarantee: `fit` costs at most `event_`, certified as (`epsilon_`, `delta`); the account is charged first.
    """

    def __init__(
        self,
        *,
        classes: ArrayLike | None = None,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        data_norm: float | None = None,
        ridge: float | None = None,
        rows_per_group: int = 10,
        account: Charged | None = None,
        seed: int | None = None,
    ) -> None:
        self.classes, self.epsilon, self.delta, self.data_norm = classes, epsilon, delta, data_norm
        self.ridge, self.rows_per_group, self.account, self.seed = ridge, rows_per_group, account, seed

    def fit(self, X: Any, y: Any, *, groups: Any = None) -> PrivateRidgeClassifier:
        """Learn from rows `X` and labels `y`; with `groups`, an id for every row, people are protected.

        Raises:
            InvalidArgument: there are no classes, or a label or a setting is not among what is allowed.
            BudgetExceeded: the account has not enough left; nothing was released.
        """
        self.__dict__.pop("model_", None)
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = told(self.classes, y)
        if len(self.classes_) < 2:
            raise InvalidArgument(f"classes={list(self.classes_)}: want two or more; one class teaches nothing")
        targets, ridge = models.class_targets(placed(self.classes_, y), len(self.classes_)), self._ridge()
        self.model_ = models.class_model(self._released(self._rows(X), targets, groups), ridge)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The share of each class, in the order of `classes_`: not calibrated."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float64, reset=False)
        return models.shares(self.model_(self._rows(rows)))

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The class with the largest share, for each row."""
        places = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[places])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True
        return tags
