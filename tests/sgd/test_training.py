"""The trainer: end to end on digits, validation that is billed, averages, schedules, views, early stop."""

import math
from contextlib import suppress

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget, Composed, Gaussian, Repeated, Reproducible
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping import Clipper
from terrine.sgd.loss import as_loss, average_views
from terrine.sgd.metrics import Budgeted, PublicValidation, right
from terrine.sgd.optimizers import Average, CorrectedAdam
from terrine.sgd.trainer import affordable_steps

from .helpers import Notes, distance, flatten
from .oracle import assert_same, loop

CRITERION = nn.CrossEntropyLoss()


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
    paid = Reproducible(Repeated(Gaussian(noise=5.0), 3))
    assert account.charges == [Composed([digits_plan().event, paid])]
    assert len(history.scores) == 3
    assert history.scores[-1][0] == 150


class Stop(Exception):
    pass


class Killer:
    """A schedule that ends the run after so many steps."""

    def __init__(self, steps):
        self._steps = steps

    def step(self):
        self._steps -= 1
        if not self._steps:
            raise Stop

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def interrupted(small, path, account, **options):
    """A run of six steps that is killed after the fifth, and the same again, which goes on."""
    for killed, changes in ((5, {}), (-1, options.pop("again", {}))):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        plan = sgd.Plan(examples=12, lot=6, steps=6, clip=0.7, noise=1.0, delta=1e-5)
        learner = sgd.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            plan,
            account=account,
            schedule=Killer(killed),
            checkpoint=Checkpoint(path, every=2),
            progress=False,
            **{**options, **changes},
        )
        with suppress(Stop):
            history = learner.fit(small)
    return plan, history


def test_looks_are_charged_once_however_often_the_run_is_resumed(small, tmp_path):
    account = Notes()
    plan, _ = interrupted(small, tmp_path / "run.pt", account, validation=Budgeted(small, noise=5.0, times=3))
    assert account.charges == [Composed([plan.event, Repeated(Gaussian(noise=5.0), 3)])]


@pytest.mark.parametrize("other", [None, Budgeted((torch.zeros(2, 4), torch.zeros(2).long()), noise=2.0)])
def test_a_run_is_not_resumed_with_looks_that_were_not_charged(small, tmp_path, other):
    looks = Budgeted(small, noise=5.0, times=3)
    with pytest.raises(InvalidArgument, match="with another"):
        interrupted(small, tmp_path / "run.pt", Notes(), validation=looks, again={"validation": other})


@pytest.mark.parametrize("bounds", [{"weight": 1.0}, {"": 1.0, "bais": 1.0}], ids=["one is missing", "one is strange"])
def test_nothing_is_charged_for_bounds_that_do_not_fit_the_model(small, bounds):
    account, model = Notes(), nn.Linear(4, 3)
    plan = sgd.Plan(examples=12, lot=6, steps=6, clip=sgd.PerLayer(bounds), noise=1.0, delta=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match="bounds"):
        sgd.Trainer(model, optimizer, nn.CrossEntropyLoss(), plan, account=account).fit(small)
    assert not account.charges


def test_looks_are_not_charged_for_a_model_that_is_refused(small):
    account = Notes()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    plan = sgd.Plan(examples=12, lot=6, steps=6, clip=0.7, noise=1.0, delta=1e-5)
    learner = sgd.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        plan,
        account=account,
        validation=Budgeted(small, noise=5.0),
    )
    with pytest.raises(InvalidArgument, match="BatchNorm1d"):
        learner.fit(small)
    assert account.charges == []


def test_nothing_is_trained_where_the_account_refuses(digits):
    learner = trainer(digits_plan(), account=Notes(refuse=True))
    before = [one.clone() for one in learner.model.parameters()]
    with pytest.raises(BudgetExceeded):
        learner.fit(digits[0])
    assert all(torch.equal(one, other) for one, other in zip(before, learner.model.parameters(), strict=True))


def test_the_best_model_by_public_data_is_kept(digits):
    learner = trainer(digits_plan(), validation=PublicValidation(digits[1], every=10), average=Average(0.9))
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
    assert account.charges[0] == plan.event_after(history.steps)
    assert affordable_steps(plan, Budget(epsilon=1e-9, delta=1e-9)) == 0


@pytest.mark.parametrize("preparation", [(), (Gaussian(noise=0.5),)])
def test_a_budget_for_no_step_is_refused_before_it_is_charged(digits, preparation):
    account = Notes()
    learner = trainer(digits_plan(preparation=preparation), account=account)
    with pytest.raises(BudgetExceeded, match="not one step"):
        learner.fit(digits[0], until=Budget(epsilon=0.01, delta=1e-5))
    assert account.charges == []


def test_views_that_nothing_makes_are_refused(digits):
    with pytest.raises(InvalidArgument, match="views=4"):
        trainer(digits_plan(), views=4)
    with pytest.raises(InvalidArgument, match="views=0"):
        trainer(digits_plan(), views=0, augment=torch.clone)


def test_the_scores_before_an_interruption_are_remembered(small, tmp_path):
    _, history = interrupted(small, tmp_path / "run.pt", None, validation=PublicValidation(small, every=2))
    assert [taken for taken, _ in history.scores] == [2, 4, 6]


def test_a_schedule_of_learning_rates_runs_with_the_steps(digits):
    learner = trainer(digits_plan(epochs=2))
    learner.schedule = torch.optim.lr_scheduler.StepLR(learner.optimizer, step_size=10, gamma=0.1)
    learner.fit(digits[0])
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


def test_views_of_an_example_are_averaged_before_clipping(small, linear):
    """One clipped gradient per example, of the mean loss over its views: not one per view."""

    def augment(x):
        return x * (2 * torch.randn(4) + 1)

    def loss(model, batch):
        return torch.stack([CRITERION(model(augment(batch[0])), batch[1]) for _ in range(3)]).mean()

    torch.manual_seed(7)
    expected = loop(linear, loss, small, 0.7)
    torch.manual_seed(7)
    found = Clipper(linear, average_views(as_loss(CRITERION), augment, 3), microbatch=1).add_up(small, sgd.Flat(0.7))
    assert_same(found, expected, 1e-5)


@pytest.mark.parametrize("clip", [sgd.PerLayer({"0": 0.3, "2": 0.2}), sgd.Automatic(0.4), sgd.Flat(0.4)])
def test_a_trainers_views_are_clipped_by_every_rule(digits, clip):
    x, y = (some[:20] for some in digits[0])
    plan = digits_plan(examples=20, lot=20, clip=clip, noise=0.0, steps=1, epochs=None)
    learner = trainer(plan, augment=lambda x: x + 0.5, views=2)
    alone = sgd.clipped_sum(learner.model, CRITERION, (x + 0.5, y), clip=clip)  # both views are the same
    assert learner.fit((x, y)).steps == 1
    gradients = flatten([one.grad for one in learner.model.parameters()])
    torch.testing.assert_close(20 * gradients, flatten(alone.sums), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("augment", [lambda x: x - x.mean(0), lambda x: x / x.abs().max(), lambda x: x.flip(0)])
def test_an_augmentation_sees_one_example(small, linear, augment):
    x, y = small
    x = torch.cat([x, 1e3 * x[:1]])
    loss = average_views(as_loss(CRITERION), augment, 1)
    with_it, without = (sgd.clipped_sum(linear, loss, (x[:n], torch.cat([y, y[:1]])[:n]), clip=0.5) for n in (13, 12))
    assert distance(with_it, without) <= 0.5 * (1 + 1e-5)


def test_a_trainer_with_views_takes_its_steps(digits):
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


def evaluated(model, criterion, data, **options):
    plan = sgd.Plan(examples=12, lot=6, steps=3, clip=0.7, noise=1.0, delta=1e-5)
    learner = sgd.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, plan, progress=False)
    return learner.evaluate(data, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("at_once", [1024, 5, 1])
def test_the_loss_is_a_mean_whatever_the_reduction(small, linear, reduction, at_once):
    found = evaluated(linear, nn.CrossEntropyLoss(reduction=reduction), small, at_once=at_once)
    assert found.loss == pytest.approx(nn.CrossEntropyLoss()(linear(small[0]), small[1]).item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 3)], ids=str)
def test_targets_that_are_no_classes_have_no_accuracy(small, shape):
    outputs = shape[1] if len(shape) > 1 else 1
    model = nn.Sequential(nn.Linear(4, outputs), nn.Flatten(0) if len(shape) == 1 else nn.Identity())
    target = torch.randn(shape)
    found = evaluated(model, nn.MSELoss(), (small[0], target))
    assert found.loss == pytest.approx(nn.MSELoss()(model(small[0]), target).item(), rel=1e-5)
    assert math.isnan(found.accuracy)
    with pytest.raises(InvalidArgument, match="classes"):
        Budgeted((small[0], target), noise=1.0)


def test_an_example_with_many_targets_counts_as_one(linear):
    """Else one of them would move a paid-for count of right answers by more than 1."""
    output = torch.randn(5, 3, 7)
    target = output.argmax(1)
    assert torch.equal(right(output, target), torch.ones(5).double())
    with pytest.raises(InvalidArgument, match="want one output for each class"):
        right(output, target.unsqueeze(1))


def test_a_list_of_samples_is_evaluated_as_it_is_trained_on(small, linear):
    listed = [(x, int(y)) for x, y in zip(*small, strict=True)]
    assert evaluated(linear, nn.CrossEntropyLoss(), listed) == evaluated(linear, nn.CrossEntropyLoss(), small)
    for empty in ([], (small[0][:0], small[1][:0])):
        with pytest.raises(InvalidArgument, match="without examples"):
            evaluated(linear, nn.CrossEntropyLoss(), empty)
