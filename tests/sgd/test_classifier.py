"""The scikit-learn estimator: its conventions, and what it learns."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Reproducible
from terrine.sgd import PrivateClassifier


@parametrize_with_checks([PrivateClassifier(classes="public", epsilon=8.0, epochs=1, seed=0)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return X[:1500], y[:1500], X[1500:], y[1500:]


@pytest.mark.parametrize(
    "options", [{}, {"hidden": (32,)}, {"module": lambda inputs, classes: nn.Linear(inputs, classes)}]
)
def test_digits_are_learned(digits, options):
    X, y, X_test, y_test = digits
    model = PrivateClassifier(classes="public", epsilon=4.0, lot=150, learning_rate=4.0, seed=1, **options).fit(X, y)
    assert model.score(X_test, y_test) > 0.7
    assert model.epsilon_ <= 4.0
    assert isinstance(model.event_, Reproducible)
    assert np.allclose(model.predict_proba(X_test).sum(axis=1), 1)


def test_a_module_is_copied_not_trained_in_place(digits):
    module = nn.Linear(64, 10)
    before = module.weight.detach().clone()
    fitted = PrivateClassifier(module, classes="public", lot=300, epochs=1, seed=0).fit(digits[0], digits[1])
    assert bool((module.weight == before).all())
    assert not bool((fitted.module_.weight == before).all())


def test_labels_are_words_or_numbers_and_may_be_fixed_in_advance(digits):
    names = np.array([f"digit {label}" for label in digits[1]])
    fitted = PrivateClassifier(classes="public", epochs=1, seed=0).fit(digits[0], names)
    assert set(fitted.predict(digits[2])) <= set(names)
    wider = PrivateClassifier(epochs=1, seed=0, classes=range(12)).fit(digits[0], digits[1])
    assert wider.predict_proba(digits[2]).shape[1] == 12
    with pytest.raises(InvalidArgument, match="not among the classes"):
        PrivateClassifier(classes=range(3)).fit(digits[0], digits[1])


def test_it_works_inside_scikit_learn(digits):
    model = PrivateClassifier(classes="public", epsilon=8.0, epochs=3, seed=0)
    assert len(cross_val_score(clone(model), digits[0][:300], digits[1][:300], cv=2)) == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"lot": 0}, "lot=0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"module": nn.Linear(64, 15)}, r"shape \(1, 15\) for one row; want \(1, 10\)"),
        ({"module": lambda inputs, classes: nn.Linear(inputs, 5)}, r"\(1, 5\)"),
    ],
    ids=["lot", "nan", "negative", "module", "function"],
)
def test_a_fit_that_is_refused_leaves_nothing_fitted(digits, wrong, why):
    class Notes:
        charges = 0

        def charge(self, event, *, purpose, by):
            self.charges += 1

    model = PrivateClassifier(classes="public", epochs=1, seed=0).fit(digits[0], digits[1])
    account = Notes()
    model.set_params(account=account, **wrong)
    with pytest.raises(InvalidArgument, match=why):
        model.fit(digits[0], digits[1])
    assert account.charges == 0
    with pytest.raises(NotFittedError):
        model.predict(digits[2])


def test_a_fit_that_the_account_refuses_predicts_nothing(digits):
    class Poor:
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing left")

    model = PrivateClassifier(classes="public", epochs=1, account=Poor())
    with pytest.raises(BudgetExceeded):
        model.fit(digits[0], digits[1])
    with pytest.raises(NotFittedError):
        model.predict(digits[2])


def test_a_loss_of_ones_own_is_a_criterion_or_a_function_of_module_and_batch(digits):
    x, y = digits[0], digits[1]
    given = {"classes": list(range(10)), "seed": 3, "epochs": 2}

    def loss(module, batch):
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    usual = PrivateClassifier(**given).fit(x, y)
    for own in (loss, nn.CrossEntropyLoss(reduction="sum")):
        fitted = PrivateClassifier(loss=own, **given).fit(x, y)
        assert np.allclose(fitted.predict_proba(x), usual.predict_proba(x), atol=1e-5)
