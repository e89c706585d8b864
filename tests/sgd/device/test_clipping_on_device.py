"""Clipped sums and private loops on every device that is here: everything stays on it, and the CPU's numbers come out.

On the pretend device, a tensor that was left on the CPU is an error. What runs the model may answer an error by a
slower way, so the tests also ask that the device took the way that the CPU took.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.common import generators
from terrine.sgd.clipping import contribution, ghost
from terrine.sgd.clipping.alone import way_of
from terrine.sgd.metrics import Budgeted, PublicValidation
from terrine.sgd.optimizers import Average

from ..helpers import distance
from . import pretend

CLASSES = 3
CRITERION = nn.CrossEntropyLoss()


class Sentences(nn.Module):
    """Words, a recurrent network, and the class of the last state."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.words, self.network, self.head = nn.Embedding(11, 6), kind(6, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, tokens):
        return self.head(self.network(self.words(tokens))[0][:, -1])


class Attentive(nn.Module):
    """One layer of a transformer, averaged."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


class Tied(nn.Module):
    """A table that is used for the words and for the classes, and a piece of a parameter by itself."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(11, 6), nn.Parameter(torch.ones(2, 6))

    def forward(self, tokens):
        return (self.words(tokens).mean(1) * self.scale[0] + self.scale[1]) @ self.words.weight[:CLASSES].t()


class Doubled(torch.autograd.Function):
    """A function that vmap cannot run."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Strange(nn.Module):
    """It has to be run one example at a time."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return Doubled.apply(self.head(x[:, [3, 1, 0, 2]]))


class Recomputed(nn.Module):
    """It computes its hidden layer again on the way back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(torch.utils.checkpoint.checkpoint(lambda one: self.first(one).tanh(), x, use_reentrant=False))


def mlp(dropout=0.0):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten(),
        nn.LayerNorm(16), nn.Linear(16, CLASSES),
    )  # fmt: skip


def bags():
    return nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, CLASSES))


FEATURES, IMAGES, TOKENS, SERIES = (4,), (1, 8, 8), None, (5, 8)
MODELS = {
    "mlp": (mlp, FEATURES),
    "cnn": (cnn, IMAGES),
    "lstm": (Sentences, TOKENS),
    "gru": (lambda: Sentences(nn.GRU), TOKENS),
    "transformer": (Attentive, SERIES),
    "bags": (bags, TOKENS),
    "tied": (Tied, TOKENS),
    "one by one": (Strange, FEATURES),
    "recomputed": (Recomputed, FEATURES),
}
EVERY_MODEL = pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS.keys())
ONE_WAY = ("lifted", "shielded", "one_by_one")


def examples(shape, count=9):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    if shape is None:
        return torch.randint(0, 11, (count, 4), generator=generator), y
    return 3 * torch.randn(count, *shape, generator=generator), y


def assert_same(here, there, device):
    """Tensors by name, the same numbers, the second ones on the device."""
    assert {one.device.type for one in there.values()} == {device.type}
    found = {name: one.detach().cpu() for name, one in there.items()}
    close = (1e-2, 1e-3) if device.type == "cuda" else (1e-4, 1e-5)  # cuda rounds the factors of convolutions
    expected = {name: one.detach() for name, one in here.items()}
    torch.testing.assert_close(found, expected, rtol=close[0], atol=close[1])


def compared(make, shape, device, clip=1.0, count=9, **options):
    """Clipped sums on the CPU and on the device, which must be the same, found in the same way."""
    model, (x, y) = make(), examples(shape, count)
    moved = copy.deepcopy(model).to(device)
    here = sgd.clipped_sum(model, CRITERION, (x, y), clip=clip, **options)
    there = sgd.clipped_sum(moved, CRITERION, (x.to(device), y.to(device)), clip=clip, **options)
    assert_same(here.sums, there.sums, device)
    assert_same({"norms": here.norms}, {"norms": there.norms}, device)
    assert [getattr(way_of(model), one) for one in ONE_WAY] == [getattr(way_of(moved), one) for one in ONE_WAY]


@EVERY_MODEL
def test_clipped_sums(device, make, shape):
    compared(make, shape, device)


@pytest.mark.parametrize(
    "clip", [sgd.Automatic(0.5), sgd.PerLayer({"0": 0.5, "3": 0.2})], ids=["automatic", "per layer"]
)
def test_other_ways_to_clip(device, clip):
    compared(mlp, FEATURES, device, clip=clip)


@pytest.mark.parametrize("options", [{"microbatch": 4}, {"memory": 20_000}], ids=["microbatch", "memory"])
def test_a_few_examples_at_a_time(device, options):
    compared(cnn, IMAGES, device, **options)


def test_a_single_example(device):
    compared(Attentive, SERIES, device, count=1)


def test_no_example(device):
    compared(mlp, FEATURES, device, count=0)


class Rough(nn.Module):
    """Runs in half precision by itself."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_half_precision(device, precision):
    model, (x, y) = Rough(), examples(FEATURES)
    fine = sgd.clipped_sum(copy.deepcopy(model).inner, CRITERION, (x, y), clip=1.0)
    model = model.to(device) if precision is None else model.inner.to(device)
    rough = sgd.clipped_sum(model, CRITERION, (x.to(device), y.to(device)), clip=1.0, precision=precision)
    for name, one in fine.sums.items():
        found = rough.sums[name if precision else f"inner.{name}"]
        assert (found.device.type, found.dtype) == (device.type, torch.float32)
        torch.testing.assert_close(found.cpu(), one, rtol=0.1, atol=0.1)
    assert not way_of(model).one_by_one


def test_an_example_sees_itself_alone(device):
    """Whatever would mix examples has but one: the last of them moves the sum by the bound."""
    x, y = examples(FEATURES)
    x, y = (1e3 * x).to(device), y.to(device)
    model = nn.Linear(4, CLASSES).to(device)

    def loss(model, batch):
        return CRITERION(model(batch[0] - batch[0].mean(0)), batch[1])

    with_it, without = (sgd.clipped_sum(model, loss, (x[:n], y[:n]), clip=1.0) for n in (9, 8))
    assert distance(with_it, without) <= 1.0 + 1e-5


# -------------------------------------------------------------------------------------------------------- private loops


def plan(**changes):
    given = {"examples": 9, "lot": 5, "steps": 4, "clip": 0.7, "noise": 0.0, "delta": 1e-5, "seed": 1}
    return sgd.Plan(**{**given, **changes})


def sgd_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def trained(model, data, made, optimizer=sgd_of, stop=None, loss=CRITERION, **options):
    """The contract's loop; returns the parameters at its end."""
    optimizer = optimizer(model)
    steps = sgd.private_steps(model, optimizer, data, made, loss=loss, **options)
    for step in steps:
        optimizer.step()
        if step.number == stop:
            steps.close()
            break
    return dict(model.named_parameters())


def compared_loops(make, shape, device, made, **options):
    model, (x, y) = make(), examples(shape)
    moved = copy.deepcopy(model).to(device)
    here = trained(model, (x, y), made, **options)
    assert_same(here, trained(moved, (x.to(device), y.to(device)), made, **options), device)
    assert [getattr(way_of(model), one) for one in ONE_WAY] == [getattr(way_of(moved), one) for one in ONE_WAY]


@EVERY_MODEL
def test_loops_without_noise(device, make, shape):
    compared_loops(make, shape, device, plan())


def adam_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"microbatch": 2}),
        ({}, {"memory": 20_000}),
        ({}, {"optimizer": adam_of}),
        ({"metrics": (sgd.Metric(), sgd.Metric.accuracy())}, {}),
        ({"clip": sgd.Automatic(0.5)}, {}),
        ({"clip": sgd.Adaptive(quantile=0.5)}, {}),
        ({"sampling": sgd.FixedSize()}, {}),
        ({"sampling": sgd.Shuffled(), "examples": 9, "lot": 3}, {}),
        ({"lot": 1, "steps": 8}, {}),  # some lots are empty
    ],
    ids=["microbatch", "memory", "adam", "metrics", "automatic", "adaptive", "fixed size", "shuffled", "empty lots"],
)
def test_loops_with_settings(device, changes, options):
    compared_loops(mlp, FEATURES, device, plan(**changes), **options)


def test_noise_is_made_on_the_device(device):
    """CPUs and other devices draw different noise; here it is what a plan without noise lacks, and of its size."""
    wide = lambda: nn.Linear(400, CLASSES)  # noqa: E731
    model, (x, y) = wide(), examples((400,))
    results = []
    for noise in (0.0, 2.0):
        moved = copy.deepcopy(model).to(device)
        data = x.to(device), y.to(device)
        results.append(
            trained(moved, data, plan(noise=noise, steps=1), lambda one: torch.optim.SGD(one.parameters(), 1.0))
        )
    noise = (results[1]["weight"] - results[0]["weight"]).detach()
    assert noise.device.type == device.type
    assert float(noise.std()) == pytest.approx(2.0 * 0.7 / 5, rel=0.1)


def test_correlated_noise_is_made_and_kept_on_the_device(device):
    """At a small rate, what three steps move the parameters by is the gradients' sum and the noise's."""
    model, (x, y) = nn.Linear(400, CLASSES), examples((400,))
    settings, results = {"lot": 3, "steps": 3, "sampling": sgd.Shuffled(), "correlated": sgd.Banded(3)}, []
    for noise in (0.0, 2.0):
        made, moved = plan(noise=noise, **settings), copy.deepcopy(model).to(device)
        data = x.to(device), y.to(device)
        results.append(trained(moved, data, made, lambda one: torch.optim.SGD(one.parameters(), 1e-3))["weight"])
    noise = (results[1] - results[0]).detach() / 1e-3
    assert noise.device.type == device.type
    expected = 2.0 * 2 * 0.7 / 3 * made.correlated.max_error(3)
    assert float(noise.std()) == pytest.approx(expected, rel=0.1)
    assert expected < 0.9 * 2.0 * 2 * 0.7 / 3 * sgd.Banded(1).max_error(3)


@pytest.mark.parametrize("listed", [False, True], ids=["tensors", "data set"])
def test_lots_move_to_the_model(device, listed):
    model, data = mlp(), examples(FEATURES)
    if listed:
        data = list(zip(*data, strict=True))
    here = trained(copy.deepcopy(model), data, plan())
    assert_same(here, trained(model, data, plan(), device=device), device)


def test_draws_are_repeated(device):
    with generators.replayed(device):
        once = torch.randn(5, device=device), torch.randn(5)
    assert torch.equal(once[0], torch.randn(5, device=device))
    assert torch.equal(once[1], torch.randn(5))


@pytest.mark.parametrize("make", [lambda: mlp(0.5), lambda: Attentive(0.5)], ids=["mlp", "transformer"])
def test_a_seeded_run_repeats_the_draws_of_the_device(device, make):
    """Dropout draws from the device's own generator."""
    model, (x, y) = make(), examples(FEATURES if isinstance(make(), nn.Sequential) else SERIES)
    data, made, ends = (x.to(device), y.to(device)), plan(noise=1.0), []
    for _ in range(2):
        ends.append(trained(copy.deepcopy(model).to(device), data, made))
        torch.randn(5, device=device)
    assert all(torch.equal(ends[0][name], one) for name, one in ends[1].items())


def test_a_run_goes_on_on_the_device(device, tmp_path):
    """And its model and optimizer are there, wherever they were saved."""
    model, (x, y) = mlp(), examples(FEATURES)
    data = x.to(device), y.to(device)
    trained(copy.deepcopy(model), (x, y), plan(noise=1.0), checkpoint=tmp_path / "run.pt", stop=2)
    found = trained(copy.deepcopy(model).to(device), data, plan(noise=1.0), checkpoint=tmp_path / "run.pt")
    whole = trained(copy.deepcopy(model).to(device), data, plan(noise=0.0))
    assert {one.device.type for one in found.values()} == {device.type}
    assert all(bool(found[name].isfinite().all()) and not torch.equal(found[name], whole[name]) for name in whole)


# -------------------------------------------------------------------------------------------------------------- trainer


@pytest.mark.parametrize("kind", ["public", "budgeted"])
def test_the_trainer(device, kind):
    model, (x, y) = mlp(), examples(FEATURES)
    results = []
    for place in (torch.device("cpu"), device):
        moved, data = copy.deepcopy(model).to(place), (x.to(place), y.to(place))
        validation = PublicValidation(data, every=2) if kind == "public" else Budgeted(data, noise=1.0, times=2)
        trainer = sgd.Trainer(
            moved, sgd_of(moved), CRITERION, plan(), average=Average(0.9), validation=validation,
            augment=lambda images: 2 * images, views=2, progress=False,
        )  # fmt: skip
        history = trainer.fit(data)
        scores = trainer.evaluate(data)
        results.append((dict(moved.named_parameters()), history.scores, scores.accuracy, scores.loss))
    (here, *one), (there, *two) = results
    assert_same(here, there, device)
    assert one[:2] == two[:2]
    assert one[2] == pytest.approx(two[2], rel=1e-4)


# ------------------------------------------------------------------------------- what the pretend device alone can show


@pytest.fixture
def poor(there, monkeypatch):
    """A device without float64, as Apple's mps, which the product knows by its name."""

    def widest(tensor):
        return torch.float32 if tensor.device.type == there.type else torch.float64

    monkeypatch.setattr(ghost, "widest", widest)
    monkeypatch.setattr(contribution, "widest", widest)
    with pretend.without_float64():
        yield there


@EVERY_MODEL
def test_without_float64(poor, make, shape):
    compared(make, shape, poor)
    compared_loops(make, shape, poor, plan())


def test_adaptive_clipping_without_float64(poor):
    compared_loops(mlp, FEATURES, poor, plan(clip=sgd.Adaptive(quantile=0.5)))


def test_the_trainer_without_float64(poor):
    test_the_trainer(poor, "public")
    test_the_trainer(poor, "budgeted")


def test_the_generators_of_the_device_are_untouched(there):
    before = torch.get_device_module(there).get_rng_state(there)
    with generators.untouched():
        generators.seed(bytes(32))
        torch.randn(3, device=there)
    assert torch.equal(before, torch.get_device_module(there).get_rng_state(there))


def test_the_classifier_with_a_module_of_the_device(there):
    x, y = examples(FEATURES, 200)
    before = torch.get_device_module(there).get_rng_state(there)
    classifier = sgd.PrivateClassifier(
        classes="public", module=mlp().to(there), epsilon=3.0, delta=1e-3, epochs=1, seed=1
    )
    classifier.fit(x.numpy(), y.numpy())
    assert classifier.predict(x.numpy()).shape == (200,)
    assert torch.equal(before, torch.get_device_module(there).get_rng_state(there))


THREADED = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import pretend
assert pretend.start(own_thread=True) is None
import torch
from terrine import sgd
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Conv1d(1, 3, 2), torch.nn.Flatten(), torch.nn.Linear(9, 3))
x, y = torch.randn(6, 1, 4), torch.randint(0, 3, (6,))
criterion = torch.nn.CrossEntropyLoss()
seen = []
twice = 2 * torch.ones(2, device="pretend", requires_grad=True)
twice.register_hook(lambda _: seen.append(threading.get_ident()))
twice.sum().backward()
assert seen and threading.get_ident() not in seen, "the device has no thread of its own"
results = []
for place in ("cpu", "pretend"):
    model = model.to(place)
    made = sgd.clipped_sum(model, criterion, (x.to(place), y.to(place)), clip=0.5).sums
    plan = sgd.Plan(examples=6, lot=3, steps=2, clip=0.7, noise=0.0, delta=1e-5, seed=1)
    start = {name: one.detach().clone() for name, one in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in sgd.private_steps(model, optimizer, (x.to(place), y.to(place)), plan, loss=criterion):
        optimizer.step()
    results.append([*made.values(), *(one.detach().clone() for one in model.parameters())])
    model.load_state_dict(start)
for one, two in zip(*results):
    torch.testing.assert_close(one.detach(), two.detach().cpu())
"""


def test_backward_passes_in_a_thread_of_the_device(started):
    """As on cuda: hooks are called in another thread than the one that called backward."""
    made = subprocess.run(
        [sys.executable, "-c", THREADED, str(Path(__file__).parent)], capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
