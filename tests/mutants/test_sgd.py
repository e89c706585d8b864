"""Known ways in which DP-SGD went wrong, each built on purpose: the check that guards against it must catch it.

Each check is first run on the real code, where it must pass: a check that always fails catches nothing.
"""

import itertools
import math

import pytest
import torch
from torch import nn

from terrine import accounting, sgd
from terrine.common.keys import Draw, Key
from terrine.errors import InvalidArgument
from terrine.events import PoissonSampled, Repeated
from terrine.sgd import distributed
from terrine.sgd.clipping.sums import ClippedSums
from terrine.sgd.release import StepRelease
from tests.sgd.helpers import flatten, make_optimizer

CLIP = 0.5


def data(examples=12):
    generator = torch.Generator().manual_seed(3)
    return 9 * torch.randn(examples, 4, generator=generator), torch.randint(0, 3, (examples,), generator=generator)


def released(x, y, *, noise=0.0, lot=None, steps=1, seed=0, sampling=None, metrics=(), **options):
    """The gradients that a run releases, step by step, or what it measured."""
    plan = sgd.Plan(
        examples=len(x), lot=lot or len(x), steps=steps, clip=CLIP, noise=noise, delta=1e-5, seed=seed,
        sampling=sampling or sgd.Poisson(), metrics=metrics,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    run = sgd.private_steps(model, make_optimizer(model, 0.0), (x, y), plan, loss=nn.CrossEntropyLoss(), **options)
    return [step.metrics["loss"] if metrics else flatten(step.gradients) for step in run]


# --- checks: each raises AssertionError on a run that is wrong ---------------------------------------------------


def one_example_moves_the_sum_by_at_most_the_bound():
    x, y = data()
    whole = released(x, y)[0] * len(x)
    for index in range(len(x)):
        kept = [place for place in range(len(x)) if place != index]
        without = released(x[kept], y[kept])[0] * (len(x) - 1)
        assert float((whole - without).norm()) <= CLIP * (1 + 1e-4)


def noise_has_the_deviation_of_the_event(lot=6, microbatch=None):
    x, y = torch.zeros(12, 4), torch.zeros(12, dtype=torch.long)
    steps = released(x, y, noise=2.0, lot=lot, steps=300, microbatch=microbatch)
    assert len(steps) == 300
    weights = torch.stack(steps)[:, :12]  # zero inputs: the weights' gradients are noise alone
    expected = 2.0 * CLIP / lot
    count = weights.numel()
    assert abs(float(weights.std()) / expected - 1) < 5 / math.sqrt(2 * count)  # false alarm below 1e-6


def every_lot_takes_a_step():
    x, y = data(4)
    steps = released(x, y, noise=1.0, lot=1, steps=40)
    assert len(steps) == 40
    assert all(float(one.norm()) > 0 for one in steps)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(steps))


def the_event_is_that_of_the_sampler():
    for sampling in (sgd.Poisson(), sgd.FixedSize(), sgd.Shuffled()):
        shared = {"examples": 200, "lot": 20, "clip": 1.0, "noise": 1.0, "delta": 1e-5, "steps": 100}
        event = sgd.Plan(**shared, sampling=sampling).event
        lots = [sampling.draw(Key.seeded(1), step, examples=200, lot=20) for step in range(100)]
        sizes = {len(lot) for lot in lots}
        disjoint = all(len(set().union(*map(set, lots[at : at + 10]))) == 200 for at in range(0, 100, 10))
        billed_as_poisson = isinstance(event, Repeated) and isinstance(event.event, PoissonSampled)
        assert billed_as_poisson == (len(sizes) > 1 and not disjoint)


def one_example_moves_a_metric_by_at_most_its_radius():
    x, y = data()
    metric = sgd.Metric(low=0.0, high=2.0)
    whole = 12 * (released(x, y, metrics=metric)[0] - metric.middle)
    for index in range(len(x)):
        kept = [place for place in range(len(x)) if place != index]
        without = 11 * (released(x[kept], y[kept], metrics=metric)[0] - metric.middle)
        assert abs(whole - without) <= metric.radius * (1 + 1e-4)


def a_metric_has_the_noise_of_its_event():
    x, y = torch.zeros(12, 4), torch.zeros(12, dtype=torch.long)
    metric = sgd.Metric(low=0.0, high=2.0, noise=3.0)
    values = torch.tensor(released(x, y, noise=1.0, lot=12, steps=300, metrics=metric))
    assert abs(float(values.std()) / (3.0 * metric.radius / 12) - 1) < 5 / math.sqrt(2 * 300)


CHECKS = [
    one_example_moves_a_metric_by_at_most_its_radius,
    a_metric_has_the_noise_of_its_event,
    one_example_moves_the_sum_by_at_most_the_bound,
    noise_has_the_deviation_of_the_event,
    every_lot_takes_a_step,
    the_event_is_that_of_the_sampler,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_real_code_passes(check):
    check()


def test_microbatches_carry_no_noise_of_their_own():
    noise_has_the_deviation_of_the_event(microbatch=2)


# --- mutants -----------------------------------------------------------------------------------------------------


def clip_after_average(self, contributions, squares, rule, scale=1.0):
    """Average the gradients first, then clip: one example can move it by far more than its share."""
    norms = no_clipping(self, contributions, squares, rule, scale)
    total = torch.sqrt(sum((one**2).sum() for one in self._totals.values()))
    factor = min(1.0, CLIP / float(total / len(norms)))
    self._totals = {name: one * factor for name, one in self._totals.items()}
    return norms


def no_clipping(self, contributions, squares, rule, scale=1.0):
    return REAL_ADD(self, contributions, squares, sgd.Flat(math.inf), scale)


def a_mean_taken_for_a_sum(self, contributions, squares, rule, scale=1.0):
    """Clip the already averaged gradients at the bound, then multiply back by the lot size."""
    lot = len(next(iter(squares.values())))
    norms = REAL_ADD(self, contributions, squares, rule, scale / lot)
    self._totals = {name: one * lot for name, one in self._totals.items()}
    return norms


REAL_ADD = ClippedSums.add


@pytest.mark.parametrize("mutant", [clip_after_average, no_clipping, a_mean_taken_for_a_sum], ids=lambda m: m.__name__)
def test_a_sum_that_is_not_clipped_by_example_is_caught(monkeypatch, mutant):
    monkeypatch.setattr(ClippedSums, "add", mutant)
    with pytest.raises(AssertionError):
        one_example_moves_the_sum_by_at_most_the_bound()


def test_noise_divided_by_the_drawn_size_is_caught(monkeypatch):
    real = StepRelease.release

    def by_drawn_size(self, optimizer):
        drawn = max(1, len(self.plan.sampling.draw(self.key, self.taken, examples=12, lot=6)))
        metrics = real(self, optimizer)
        for parameter in self.parameters.values():
            parameter.grad *= self.plan.lot / drawn
        return metrics

    monkeypatch.setattr(StepRelease, "release", by_drawn_size)
    with pytest.raises(AssertionError):
        noise_has_the_deviation_of_the_event()


def test_a_skipped_empty_lot_is_caught(monkeypatch):
    real = StepRelease.release

    def only_if_filled(self, optimizer):
        is_filled = bool(self.sums)
        metrics = real(self, optimizer)
        for parameter in () if is_filled else self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        return metrics

    monkeypatch.setattr(StepRelease, "release", only_if_filled)
    with pytest.raises(AssertionError):
        every_lot_takes_a_step()


def test_noise_for_every_microbatch_is_caught(monkeypatch):
    def noisy(self, contributions, squares, rule, scale=1.0):
        norms = REAL_ADD(self, contributions, squares, rule, scale)
        for total in self._totals.values():
            total += 2.0 * rule.bound * torch.randn_like(total)
        return norms

    monkeypatch.setattr(ClippedSums, "add", noisy)
    with pytest.raises(AssertionError):
        noise_has_the_deviation_of_the_event(microbatch=2)


def test_a_metric_that_is_not_clamped_is_caught(monkeypatch):
    monkeypatch.setattr(sgd.Metric, "clamped_sum", lambda self, values: float((values - self.middle).sum()))
    with pytest.raises(AssertionError):
        one_example_moves_a_metric_by_at_most_its_radius()


def test_a_metric_whose_noise_forgets_its_range_is_caught(monkeypatch):
    monkeypatch.setattr(sgd.Metric, "noise_for", lambda self, lot: 1.5)
    with pytest.raises(AssertionError):
        a_metric_has_the_noise_of_its_event()


def test_a_metric_of_the_whole_lot_is_caught(monkeypatch):
    """The mean over who was drawn, as everybody logs it."""
    monkeypatch.setattr(sgd.Metric, "clamped_sum", lambda self, values: 12 * float(values.mean()) - 12 * self.middle)
    with pytest.raises(AssertionError):
        one_example_moves_a_metric_by_at_most_its_radius()


def test_too_little_noise_is_caught(monkeypatch):
    real = Draw.protect
    monkeypatch.setattr(
        Draw, "protect", lambda self, totals, deviation, over=1.0: real(self, totals, 0.9 * deviation, over)
    )
    with pytest.raises(AssertionError):
        noise_has_the_deviation_of_the_event()


def test_noise_once_per_process_is_caught(monkeypatch):
    """Two processes that each add noise before the sum: as if the sum had been taken twice."""
    real = Draw.protect

    def twice(self, totals, deviation, over=1.0):
        real(self, totals, deviation)
        real(self, totals, deviation, over)

    monkeypatch.setattr(Draw, "protect", twice)
    assert distributed.share() == (0, 1)
    with pytest.raises(AssertionError):
        noise_has_the_deviation_of_the_event()


def test_shuffled_lots_billed_as_poisson_are_caught(monkeypatch):
    monkeypatch.setattr(sgd.Shuffled, "event", lambda self, stages, **sizes: sgd.Poisson().event(stages, **sizes))
    with pytest.raises(AssertionError):
        the_event_is_that_of_the_sampler()


def test_shuffled_lots_cost_more_than_poisson_lots_would():
    shared = {"examples": 6000, "lot": 60, "clip": 1.0, "noise": 1.0, "delta": 1e-5, "epochs": 3}
    assert sgd.Plan(**shared, sampling=sgd.Shuffled()).epsilon > 2 * sgd.Plan(**shared).epsilon


def test_batch_norm_is_caught():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plan = sgd.Plan(examples=12, lot=6, steps=1, clip=1.0, noise=1.0, delta=1e-5)
    with pytest.raises(InvalidArgument, match="1: BatchNorm1d"):
        sgd.private_steps(model, make_optimizer(model), data(), plan, loss=nn.CrossEntropyLoss())


def test_replace_one_noise_stated_for_add_remove_is_caught(monkeypatch):
    """Fixed-size lots with noise relative to C instead of 2C: two runs that differ in one example stand twice apart."""
    plan = sgd.Plan(examples=12, lot=6, steps=1, clip=CLIP, noise=1.0, delta=1e-5, sampling=sgd.FixedSize())

    def apart_over_noise():
        return 2 * CLIP / plan.deviation_at(0, CLIP)

    assert accounting.gaussian.delta(apart_over_noise(), 1.0) <= accounting.gaussian.delta(1 / plan.noise, 1.0)
    monkeypatch.setattr(sgd.FixedSize, "reach", 1.0)
    assert accounting.gaussian.delta(apart_over_noise(), 1.0) > accounting.gaussian.delta(1 / plan.noise, 1.0)
