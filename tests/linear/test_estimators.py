"""Ridge regression and least-squares classes as scikit-learn's estimators."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

from terrine import accounting, events
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.linear import PrivateRidge, PrivateRidgeClassifier


@parametrize_with_checks(
    [
        PrivateRidge(bounds=(-100, 100), epsilon=8.0, seed=0),
        PrivateRidgeClassifier(classes="public", epsilon=8.0, seed=0),
    ]
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def table(rows=3000, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(rows, 4))
    return X, 10 + 5 * X[:, 0] - 3 * X[:, 1] + 0.1 * rng.normal(size=rows)


def test_a_number_is_learned_within_its_bounds():
    X, y = table()
    model = PrivateRidge(bounds=(0, 20), data_norm=2.0, epsilon=3.0, delta=1e-5).fit(X[:2000], y[:2000])
    assert model.score(X[2000:], y[2000:]) > 0.8
    assert model.epsilon_ <= 3.0
    assert accounting.epsilon(model.event_, delta=1e-5) == model.epsilon_
    wild = PrivateRidge(bounds=(0, 20), data_norm=1e-3, epsilon=0.01).fit(X, y)
    assert wild.predict(1e9 * X).min() >= 0
    assert wild.predict(1e9 * X).max() <= 20


def test_targets_out_of_bounds_count_as_the_bound():
    X, y = table(200)
    far = np.where(np.arange(200) == 7, 1e308, y)
    same = np.where(np.arange(200) == 7, 20.0, y)
    first, second = (PrivateRidge(bounds=(0, 20), seed=1).fit(X, one).predict(X) for one in (far, same))
    assert np.array_equal(first, second)


def test_digits_are_classified():
    X, y = load_digits(return_X_y=True)
    model = PrivateRidgeClassifier(classes=range(10), epsilon=3.0, seed=0).fit(X[:1500], y[:1500])
    assert model.score(X[1500:], y[1500:]) > 0.6
    assert np.allclose(model.predict_proba(X[1500:]).sum(axis=1), 1)
    assert isinstance(model.event_, events.Reproducible)


def test_two_classes_by_name():
    X, y = table(2000)
    names = np.where(y > 10, "more", "less")
    model = PrivateRidgeClassifier(classes=["more", "less"], epsilon=2.0, seed=0).fit(X, names)
    assert (model.predict(X) == names).mean() > 0.85
    assert model.plan_.targets == 1


def test_people_are_protected_as_people():
    X, y = table(300)
    groups = np.repeat(np.arange(30), 10)
    model = PrivateRidge(bounds=(0, 20), epsilon=8.0, rows_per_group=3, seed=0).fit(X, y, groups=groups)
    assert events.settled_unit(model.event_) is events.Unit.PERSON
    assert model.plan_.units == 30


def test_nobody_guesses_bounds_or_classes():
    X, y = table(50)
    with pytest.raises(InvalidArgument, match="bounds: not given"):
        PrivateRidge().fit(X, y)
    with pytest.raises(InvalidArgument, match="classes: not given"):
        PrivateRidgeClassifier().fit(X, y > 10)
    with pytest.raises(InvalidArgument, match="PrivateRegressor"):
        PrivateRidgeClassifier(classes="public").fit(*load_diabetes(return_X_y=True))


@pytest.mark.parametrize(
    "wrong", [{"bounds": (3, 3)}, {"bounds": (0, np.inf)}, {"bounds": 7}, {"data_norm": 0.0}, {"ridge": -1.0}]
)
def test_what_is_refused_charges_nothing_and_leaves_nothing_fitted(wrong):
    class Notes:
        charges = 0

        def charge(self, event, *, purpose, by):
            self.charges += 1

    X, y = table(50)
    account = Notes()
    model = PrivateRidge(bounds=(0, 20), seed=0).fit(X, y).set_params(**{"account": account} | wrong)
    with pytest.raises(InvalidArgument):
        model.fit(X, y)
    assert account.charges == 0
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_an_empty_account_releases_nothing():
    class Poor:
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing left")

    with pytest.raises(BudgetExceeded):
        PrivateRidge(bounds=(0, 20), account=Poor()).fit(*table(50))
