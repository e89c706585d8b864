"""Attack: go on from a checkpoint with another loss, model or learning rate.

The same noise on other gradients: the difference of the two releases has no noise at all, and one of them was not paid
for.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.optimizers import Average
from terrine.sgd.validation import Budgeted, PublicValidation

PLAN = {"examples": 40, "lot": 20, "steps": 6, "clip": 1.0, "noise": 1.0, "delta": 1e-5}
TEMPERATURE = 1.0


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)


def network(width=8, activation=nn.Tanh, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width, **options), activation(), nn.Linear(width, 3))


def tempered(output, target):
    return functional.cross_entropy(output / TEMPERATURE, target, reduction="none")


def weighted(output, target, weight=1.0):
    return weight * functional.cross_entropy(output, target, reduction="none")


def scaled(by):
    return lambda output, target: by * functional.cross_entropy(output, target, reduction="none")


class Scaled:
    def __init__(self, by):
        self._by = by

    def __call__(self, output, target):
        return weighted(output, target, self._by)

    def loss(self, output, target):
        return self(output, target)


class Gated(nn.Module):
    """A number that is no parameter and no buffer decides its gradients."""

    def __init__(self, gate):
        super().__init__()
        self.inner, self.gate = nn.Linear(4, 3), gate

    def forward(self, x):
        return self.inner(x) * self.gate


class Shifted(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("by", torch.full((3,), float(by)), persistent=False)

    def forward(self, x):
        return self.inner(x + self.by.sum()) * self.by


def seeded(make):
    torch.manual_seed(0)
    return make()


def frozen():
    module = network()
    module[0].requires_grad_(False)
    return module


class Ended(Exception):
    """The process died here."""


def trainer(path, *, model=network, loss=None, optimizer=torch.optim.SGD, schedule=None, plan=None, **options):
    module = model()
    settings = {"lr": 0.1, "momentum": 0.9} | options.pop("settings", {})
    moves = optimizer(module.parameters(), **settings)
    loss = nn.CrossEntropyLoss(reduction="none") if loss is None else loss
    timed = None if schedule is None else schedule(moves)
    keep = Checkpoint(path)
    plan = sgd.Plan(**PLAN | (plan or {}))
    return sgd.Trainer(module, moves, loss, plan, schedule=timed, checkpoint=keep, progress=False, **options)


def interrupted(path, data, monkeypatch, **options):
    """A run that died after three of its steps; none of them was saved."""
    with monkeypatch.context() as patched:
        taken, step = [], sgd.Trainer._step

        def dying(self, lots, batch):
            if len(taken) == 3:
                raise Ended
            taken.append(1)
            step(self, lots, batch)

        patched.setattr(sgd.Trainer, "_step", dying)
        with pytest.raises(Ended):
            trainer(path, **options).fit(data)


LOSSES = {
    "of another name": ({}, {"loss": tempered}),
    "with other settings": ({}, {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)}),
    "with a weight for each class": (
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0]), reduction="none")},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 2.0]), reduction="none")},
    ),
    "with another argument": (
        {"loss": functools.partial(weighted, weight=1.0)},
        {"loss": functools.partial(weighted, weight=2.0)},
    ),
    "with another number in its closure": ({"loss": scaled(1.0)}, {"loss": scaled(2.0)}),
    "that is another lambda": (
        {"loss": lambda o, y: functional.cross_entropy(o, y, reduction="none")},
        {"loss": lambda o, y: functional.cross_entropy(2 * o, y, reduction="none")},
    ),
    "that is an object": ({"loss": Scaled(1.0)}, {"loss": Scaled(2.0)}),
    "that is a method": ({"loss": Scaled(1.0).loss}, {"loss": Scaled(2.0).loss}),
}


@pytest.mark.parametrize(("before", "after"), LOSSES.values(), ids=LOSSES)
def test_another_loss_is_refused(tmp_path, data, monkeypatch, before, after):
    interrupted(tmp_path / "run.pt", data, monkeypatch, **before)
    with pytest.raises(InvalidArgument, match=r"another loss.* paid for"):
        trainer(tmp_path / "run.pt", **after).fit(data)
    trainer(tmp_path / "run.pt", **before).fit(data)


def test_a_loss_that_reads_another_global_is_refused(tmp_path, data, monkeypatch):
    interrupted(tmp_path / "run.pt", data, monkeypatch, loss=tempered)
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "TEMPERATURE", 2.0)
        with pytest.raises(InvalidArgument, match="another loss"):
            trainer(tmp_path / "run.pt", loss=tempered).fit(data)
    trainer(tmp_path / "run.pt", loss=tempered).fit(data)


OTHERS = {
    "learning rate": ({}, {"settings": {"lr": 0.2}}),
    "momentum": ({}, {"settings": {"momentum": 0.5}}),
    "optimizer": ({}, {"optimizer": lambda parameters, lr, momentum: torch.optim.RMSprop(parameters, lr, momentum)}),
    "width": ({}, {"model": lambda: network(width=9)}),
    "activation": ({}, {"model": lambda: network(activation=nn.Sigmoid)}),
    "precision": ({}, {"model": lambda: network().double()}),
    "frozen layer": ({}, {"model": lambda: frozen()}),
    "attribute": ({"model": lambda: seeded(lambda: Gated(1.0))}, {"model": lambda: seeded(lambda: Gated(2.0))}),
    "buffer": ({"model": lambda: seeded(lambda: Shifted(1))}, {"model": lambda: seeded(lambda: Shifted(2))}),
    "schedule": (
        {"schedule": lambda moves: torch.optim.lr_scheduler.StepLR(moves, 2, gamma=0.5)},
        {"schedule": lambda moves: torch.optim.lr_scheduler.StepLR(moves, 2, gamma=0.1)},
    ),
    "no schedule": ({}, {"schedule": lambda moves: torch.optim.lr_scheduler.StepLR(moves, 2)}),
    "average": ({"average": Average(0.9)}, {"average": Average(0.5)}),
    "augmentation": (
        {"augment": lambda x: x, "views": 2},
        {"augment": lambda x: -x, "views": 2},
    ),
    "views": ({"augment": functional.relu, "views": 2}, {"augment": functional.relu, "views": 3}),
    "clip": ({}, {"plan": {"clip": 2.0}}),
}


@pytest.mark.parametrize(("before", "after"), OTHERS.values(), ids=OTHERS)
def test_another_model_or_way_of_training_is_refused(tmp_path, data, monkeypatch, before, after):
    interrupted(tmp_path / "run.pt", data, monkeypatch, **before)
    with pytest.raises(InvalidArgument, match="another") as refused:
        trainer(tmp_path / "run.pt", **after).fit(data)
    assert "\n" not in str(refused.value)
    trainer(tmp_path / "run.pt", **before).fit(data)


def test_other_validation_data_are_refused(tmp_path, data, monkeypatch):
    """The noise on a look is reused as well: two counts under one noise."""
    looks = [Budgeted((data[0][:20] + shift, data[1][:20]), noise=2.0, times=2) for shift in (0.0, 1.0)]
    interrupted(tmp_path / "run.pt", data, monkeypatch, validation=looks[0])
    with pytest.raises(InvalidArgument, match="another validation"):
        trainer(tmp_path / "run.pt", validation=looks[1]).fit(data)
    with pytest.raises(InvalidArgument, match="validation"):
        trainer(tmp_path / "run.pt", validation=PublicValidation((data[0], data[1]))).fit(data)
    trainer(tmp_path / "run.pt", validation=looks[0]).fit(data)


def test_every_offender_is_named_at_once(tmp_path, data, monkeypatch):
    interrupted(tmp_path / "run.pt", data, monkeypatch)
    with pytest.raises(InvalidArgument, match="another learning rate, loss, model"):
        trainer(
            tmp_path / "run.pt", loss=tempered, settings={"lr": 1.0}, model=lambda: network(activation=nn.Sigmoid)
        ).fit(data)


def test_the_same_things_made_anew_go_on(tmp_path, data, monkeypatch):
    """A closure, a schedule and a model that were built again are the ones the run was begun with."""
    same = {
        "schedule": lambda moves: torch.optim.lr_scheduler.LambdaLR(moves, lambda step: 1 / (1 + step)),
        "average": Average(0.9),
    }
    interrupted(tmp_path / "run.pt", data, monkeypatch, loss=scaled(2.0), **same)
    found = trainer(tmp_path / "run.pt", loss=scaled(2.0), **same | {"average": Average(0.9)}).fit(data)
    assert found.steps == 6


def test_a_finished_run_of_another_model_is_refused_in_words(tmp_path, data):
    trainer(tmp_path / "run.pt").fit(data)
    with pytest.raises(InvalidArgument, match="another model"):
        trainer(tmp_path / "run.pt", model=lambda: network(width=9)).fit(data)
    trainer(tmp_path / "run.pt").fit(data)


def loop(path, data, *, scale=1.0, stop=99, every=100, rate=0.1, width=8, found=None):
    """An ordinary loop, whose loss nobody sees before the step; what each step released is put into `found`."""
    module = network(width=width)
    moves = torch.optim.SGD(module.parameters(), lr=rate)
    keep = Checkpoint(path, every=every)
    module, moves, lots = sgd.make_private(module, moves, data, sgd.Plan(**PLAN), checkpoint=keep)
    for x, y in lots:
        if lots.run.step.taken == stop and every == 1:
            return module  # between two steps: the last one is saved
        moves.zero_grad()
        (scale * functional.cross_entropy(module(x), y)).backward()
        moves.step()
        if found is not None:
            found[lots.run.step.taken] = module[0].weight.grad.clone()
        if lots.run.step.taken == stop and every > 1:
            return module
    return module


def test_a_loop_does_not_repeat_a_step_with_another_loss(tmp_path, data):
    """The attack itself: the two releases of a step differ by gradients alone."""
    first, second = {}, {}
    loop(tmp_path / "run.pt", data, stop=3, found=first)
    with pytest.raises(InvalidArgument, match=r"step 1 was taken before, with other gradients.* paid for"):
        loop(tmp_path / "run.pt", data, scale=0.5, found=second)
    assert not second
    loop(tmp_path / "run.pt", data, found=second)
    assert all(torch.equal(first[step], second[step]) for step in (1, 2, 3))


def test_a_loop_may_go_on_with_another_loss_where_no_step_is_repeated(tmp_path, data):
    """Every step has its noise once: that is what was paid for."""
    loop(tmp_path / "run.pt", data, stop=3, every=1)
    loop(tmp_path / "run.pt", data, scale=0.5, every=1)


@pytest.mark.parametrize(
    ("change", "said"), [({"rate": 0.5}, "another learning rate"), ({"width": 9}, "another model")]
)
def test_a_loop_with_another_model_or_rate_is_refused(tmp_path, data, change, said):
    loop(tmp_path / "run.pt", data, stop=3)
    with pytest.raises(InvalidArgument, match=said):
        loop(tmp_path / "run.pt", data, **change)


def test_what_was_noted_of_steps_is_sealed_private_and_gone_at_the_end(tmp_path, data):
    found = {}
    loop(tmp_path / "run.pt", data, stop=3, found=found)
    notes = tmp_path / "run.pt.steps"
    assert notes.stat().st_mode & 0o777 == 0o600
    for gradient in found.values():
        assert gradient.numpy().tobytes()[:16] not in notes.read_bytes()
    loop(tmp_path / "run.pt", data)
    assert not notes.exists()


def test_sums_that_are_rounded_otherwise_are_the_same_step(tmp_path, data, monkeypatch):
    """Kernels that add up in no fixed order must not keep a run from going on."""
    loop(tmp_path / "run.pt", data, stop=3)
    add = sgd.step.Step.add

    def jittered(self, clipped):
        for value in clipped.sums.values():
            value.mul_(1 + 1e-6 * float(np.random.default_rng(0).random()))
        add(self, clipped)

    monkeypatch.setattr(sgd.step.Step, "add", jittered)
    loop(tmp_path / "run.pt", data)
