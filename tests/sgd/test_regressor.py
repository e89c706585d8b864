"""The scikit-learn regressor: its conventions, its bounds, and what it learns."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.utils.estimator_checks import parametrize_with_checks

from terrine.common.targets import NumberLoss, TargetBounds
from terrine.errors import InvalidArgument
from terrine.sgd import PrivateClassifier, PrivateRegressor


@parametrize_with_checks([PrivateRegressor(bounds=(-100, 100), epsilon=8.0, epochs=1, seed=0)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def table(rows=2000):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(rows, 4))
    return X, 10 + 5 * X[:, 0] - 3 * X[:, 1] + 0.1 * rng.normal(size=rows)


@pytest.mark.parametrize("options", [{}, {"loss": "absolute", "learning_rate": 1.0}])
def test_a_number_is_learned_within_its_bounds(options):
    X, y = table()
    model = PrivateRegressor(bounds=(0, 20), normalise=False, epsilon=8.0, epochs=10, seed=1, **options).fit(X, y)
    assert model.score(X, y) > 0.5
    assert model.epsilon_ <= 8.0
    assert model.predict(1e6 * X).min() >= 0
    assert model.predict(1e6 * X).max() <= 20


def test_a_target_outside_the_bounds_counts_as_the_bound():
    X, y = table(100)
    far, same = (np.where(np.arange(100) == 3, value, y) for value in (-1e30, 0.0))
    first, second = (PrivateRegressor(bounds=(0, 20), epochs=1, seed=1).fit(X, one).predict(X) for one in (far, same))
    assert np.array_equal(first, second)


def test_nobody_guesses_bounds_or_classes():
    X, y = load_diabetes(return_X_y=True)
    with pytest.raises(InvalidArgument, match="bounds: not given"):
        PrivateRegressor().fit(X, y)
    with pytest.raises(InvalidArgument, match="classes: not given"):
        PrivateClassifier().fit(X, y > 100)
    with pytest.raises(InvalidArgument, match=r"214 different numbers; want classes, or PrivateRegressor"):
        PrivateClassifier(classes="public").fit(X, y)
    with pytest.raises(InvalidArgument, match="loss='cubic'"):
        PrivateRegressor(bounds=(0, 400), loss="cubic").fit(X, y)


def test_bounds_there_and_back():
    bounds = TargetBounds(-5, 15)
    assert np.allclose(bounds.scaled([-5, 5, 15, 99, -np.inf]), [-1, 0, 1, 1, -1])
    assert np.allclose(bounds.unscaled([-1, 0, 1, 7]), [-5, 5, 15, 15])
    assert np.isnan(bounds.scaled([np.nan]))
    for wrong in ((1, 1), (2, 1), (0, np.inf), (-1e308, 1e308), (np.nan, 1)):
        with pytest.raises(InvalidArgument):
            TargetBounds(*wrong)


def test_a_target_of_nan_adds_no_gradient():
    output = torch.ones(3, 1, requires_grad=True)
    NumberLoss()(output, torch.tensor([0.0, torch.nan, 1.0])).sum().backward()
    assert output.grad is not None
    assert output.grad[:, 0].tolist() == [2.0, 0.0, 0.0]
