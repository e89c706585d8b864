"""The trainer: end to end on digits, validation that is billed, averages, schedules, views, early stop."""

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.errors import BudgetExceeded
from terrine.events import Budget, Gaussian, Repeated
from terrine.sgd.averaging import Average
from terrine.sgd.optimizers import CorrectedAdam
from terrine.sgd.training import affordable_steps
from terrine.sgd.validation import Budgeted, Public
from terrine.sgd.views import Views, augmented, averaged

from .conftest import oracle


class Notes:
    """An account that only takes notes, or refuses."""

    name = "notes"

    def __init__(self, *, refuse=False):
        self.charges, self.refuse = [], refuse

    def charge(self, event, *, purpose, by):
        if self.refuse:
            raise BudgetExceeded("nothing left")
        self.charges.append((event, purpose))


def trainer(plan, **options):
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = options.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=2.0))
    return sgd.Trainer(model, optimizer(model.parameters()), nn.CrossEntropyLoss(), plan, progress=False, **options)


def digits_plan(**changes):
    given = {"examples": 1500, "lot": 150, "epochs": 15, "clip": 1.0, "noise": 1.0, "delta": 1e-5, "seed": 0}
    return sgd.Plan(**{**given, **changes})


def test_digits_are_learned_in_seconds(digits):
    train, test = digits
    plan = digits_plan()
    learner = trainer(plan)
    history = learner.fit(train)
    assert learner.evaluate(test).accuracy > 0.8
    assert (history.steps, history.epsilon) == (150, plan.epsilon)


@pytest.mark.parametrize("bar", [True, False])
def test_the_progress_bar_changes_nothing(digits, bar, capsys):
    learner = trainer(digits_plan(epochs=1))
    learner._progress = bar
    assert learner.fit(digits[0]).steps == 10
    assert ("epsilon" in capsys.readouterr().err) == bar


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.02),
        lambda p: torch.optim.AdamW(p, lr=0.02),
        lambda p: CorrectedAdam(p, lr=0.02, floor=2e-3),
    ],
    ids=["momentum", "adam", "adamw", "corrected adam"],
)
def test_any_optimizer_learns(digits, optimizer):
    learner = trainer(digits_plan(), optimizer=optimizer)
    learner.fit(digits[0])
    assert learner.evaluate(digits[1]).accuracy > 0.75


def test_corrected_adam_is_told_the_variance(digits):
    learner = trainer(digits_plan(epochs=1, lot=300), optimizer=lambda p: CorrectedAdam(p))
    learner.fit(digits[0])
    assert learner.optimizer.param_groups[0]["noise_variance"] == pytest.approx((1.0 / 300) ** 2)


def test_looks_at_private_validation_data_are_charged_before_training(digits):
    account = Notes()
    looks = Budgeted((digits[1][0], digits[1][1]), noise=5.0, times=3)
    history = trainer(digits_plan(), account=account, validation=looks).fit(digits[0])
    assert [event for event, _ in account.charges] == [Repeated(Gaussian(noise=5.0), 3), digits_plan().event]
    assert len(history.scores) == 3
    assert history.scores[-1][0] == 150


def test_nothing_is_trained_where_the_account_refuses(digits):
    learner = trainer(digits_plan(), account=Notes(refuse=True))
    before = [one.clone() for one in learner.model.parameters()]
    with pytest.raises(BudgetExceeded):
        learner.fit(digits[0])
    assert all(torch.equal(one, other) for one, other in zip(before, learner.model.parameters(), strict=True))


def test_the_best_model_by_public_data_is_kept(digits):
    learner = trainer(digits_plan(), validation=Public(digits[1], every=10), average=Average(0.9))
    history = learner.fit(digits[0])
    assert learner.evaluate(digits[1]).accuracy == pytest.approx(max(score for _, score in history.scores))
    assert history.best_step in [taken for taken, _ in history.scores]


def test_training_stops_at_a_smaller_budget_and_is_charged_for_that(digits):
    account, plan = Notes(), digits_plan()
    budget = Budget(epsilon=plan.epsilon / 2, delta=1e-5)
    history = trainer(plan, account=account).fit(digits[0], until=budget)
    assert 0 < history.steps < plan.steps
    assert history.epsilon <= budget.epsilon * (1 + 1e-6)
    assert plan.epsilon_after(history.steps + 1) > budget.epsilon
    assert account.charges[0][0] == plan.event_after(history.steps)
    assert affordable_steps(plan, Budget(epsilon=1e-9, delta=1e-9)) == 0


def test_a_schedule_of_learning_rates_runs_with_the_steps(digits):
    learner = trainer(digits_plan(epochs=2))
    learner.schedule = torch.optim.lr_scheduler.StepLR(learner.optimizer, step_size=10, gamma=0.1)
    learner.fit(digits[0])
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


def test_views_of_an_example_are_averaged_before_clipping(small, linear):
    """One clipped gradient per example, of the mean loss over its views: not one per view."""
    x, y = small
    criterion = nn.CrossEntropyLoss()
    views = augmented(lambda lot: lot + torch.randn_like(lot), x, 3)
    found = sgd.clipped_sum(Views(linear), averaged(criterion), views, y, clip=0.7).sums

    expected = oracle(Views(linear), averaged(criterion), views, y, 0.7)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    assert len(augmented(torch.clone, x[:0], 3)) == 0


def test_a_trainer_with_views_learns_and_moves_by_at_most_the_bound(digits):
    learner = trainer(digits_plan(epochs=3), augment=lambda x: x + 0.05 * torch.randn_like(x), views=2)
    assert learner.fit(digits[0]).steps == 30


def test_an_average_follows_the_weights():
    model = nn.Linear(1, 1, bias=False)
    average = Average(0.5)
    for value in (0.0, 1.0, 1.0):
        nn.init.constant_(model.weight, value)
        average.update(model)
    average.exchange(model)
    first = 1 - min(0.5, 3 / 12)
    assert model.weight.item() == pytest.approx(first + (1 - first) * (1 - min(0.5, 4 / 13)))
