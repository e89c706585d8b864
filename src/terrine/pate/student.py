"""The student: an ordinary model, trained on public inputs and the answers that were paid for.

Whatever a student does with answers is post-processing: training longer, choosing what to ask next by its own doubts,
or learning from inputs nobody labelled costs nothing. `labels` holds a class for each input, or -1 (`ABSTAINED`).

    Supervised          cross-entropy on the labelled inputs
    Consistency         [SBL20] confident predictions on lightly moved inputs teach heavily moved ones
    VirtualAdversarial  [MMK18] predictions must not change in the direction that changes them most
    FeatureMatching     [SGZ16] PATE-G: a generator's images join as one more class; the generator matches mean features
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from terrine import check
from terrine.errors import InvalidArgument, MissingExtra
from terrine.pate.stacked import shifted, warped

Build = Callable[[], nn.Module]
Progress = Callable[[int, int], None]


class Method(Protocol):
    """How one step learns."""

    def loss(self, step: Step) -> Tensor:
        """What the step makes smaller."""


@dataclass(frozen=True)
class Step:
    """What a method sees in one step."""

    model: nn.Module
    labelled: Tensor
    labels: Tensor
    unlabelled: Tensor
    generator: np.random.Generator
    images: bool
    done: float
    """The share of the training that is behind."""


@dataclass(frozen=True)
class Supervised:
    """Cross-entropy on the labelled inputs, images lightly warped."""

    warp: float = 1.0
    shift: int = 2

    def loss(self, step: Step) -> Tensor:
        x = _moved(step.labelled, self.warp, self.shift, step)
        return functional.cross_entropy(step.model(x), step.labels, label_smoothing=0.05)


@dataclass(frozen=True)
class Consistency:
    """What the model is sure of on an input, it should also say when the input is moved a lot.

    Answers are noisy: once `trust` of the training is over, an answer that the model is sure is wrong is left out.
    """

    weight: float = 1.0
    sure: float = 0.9
    warp: float = 1.6
    shift: int = 3
    trust: float = 0.3

    def loss(self, step: Step) -> Tensor:
        labelled = _moved(step.labelled, 0.7, 2, step)
        weak, strong = _moved(step.unlabelled, 0.3, 1, step), _moved(step.unlabelled, self.warp, self.shift, step)
        with torch.no_grad():
            chance, guess = functional.softmax(step.model(weak), dim=1).max(dim=1)
        logits = step.model(torch.cat([labelled, strong]))
        known, other = logits[: len(labelled)], logits[len(labelled) :]
        taught = functional.cross_entropy(other, guess, reduction="none") * (chance >= self.sure)
        supervised = functional.cross_entropy(known, step.labels, reduction="none")
        if step.done > self.trust:
            chance, guess = functional.softmax(known.detach(), dim=1).max(dim=1)
            supervised = supervised * ((guess == step.labels) | (chance < self.sure))
        return supervised.mean() + self.weight * min(1.0, 5 * step.done) * taught.mean()


@dataclass(frozen=True)
class VirtualAdversarial:
    """The prediction must survive a push of length `push` in the worst direction, found by one power iteration."""

    push: float = 2.0
    probe: float = 1e-3
    weight: float = 1.0

    def loss(self, step: Step) -> Tensor:
        model, x = step.model, step.unlabelled
        with torch.no_grad():
            target = functional.softmax(model(x), dim=1)
        direction = torch.from_numpy(step.generator.standard_normal(tuple(x.shape)).astype(np.float32)).to(x.dtype)
        direction = (self.probe * _unit(direction)).requires_grad_(True)
        change = functional.kl_div(functional.log_softmax(model(x + direction), dim=1), target, reduction="batchmean")
        (slope,) = torch.autograd.grad(change, direction)
        pushed = functional.log_softmax(model(x + self.push * _unit(slope)), dim=1)
        known = functional.cross_entropy(model(step.labelled), step.labels)
        entropy = -(functional.softmax(model(x), dim=1) * functional.log_softmax(model(x), dim=1)).sum(dim=1).mean()
        return known + self.weight * (functional.kl_div(pushed, target, reduction="batchmean") + 0.1 * entropy)


@dataclass(frozen=True)
class FeatureMatching:
    """PATE-G: the classifier tells generated images from real ones; the generator matches its mean features.

    With logits l over the classes and Z = sum of e^l, an image is real with probability Z / (Z + 1).
    """

    noise: int = 50
    width: int = 256
    rate: float = 3e-4

    def loss(self, step: Step) -> Tensor:
        """Unused: a game has two losses; `train` plays it."""
        raise NotImplementedError

    def generator(self, shape: tuple[int, ...]) -> nn.Module:
        """From noise to inputs between 0 and 1."""
        return nn.Sequential(
            nn.Linear(self.noise, self.width),
            nn.BatchNorm1d(self.width),
            nn.Softplus(),
            nn.Linear(self.width, self.width),
            nn.BatchNorm1d(self.width),
            nn.Softplus(),
            nn.Linear(self.width, math.prod(shape)),
            nn.Sigmoid(),
            nn.Unflatten(1, shape),
        )

    def classify(self, step: Step, made: Tensor) -> Tensor:
        """The classifier's loss: right classes, real inputs real, made ones not."""
        known = step.model(_moved(step.labelled, 0.7, 2, step))
        real, false = (torch.logsumexp(step.model(x), dim=1) for x in (step.unlabelled, made))
        doubt = -0.5 * (real - functional.softplus(real)).mean() + 0.5 * functional.softplus(false).mean()
        return functional.cross_entropy(known, step.labels) + doubt

    def match(self, step: Step, made: Tensor) -> Tensor:
        """The generator's loss: mean features of made inputs as of real ones."""
        inner = step.model[:-1] if isinstance(step.model, nn.Sequential) else step.model
        gap = inner(step.unlabelled).mean(dim=0).detach() - inner(made).mean(dim=0)
        matched: Tensor = gap.square().mean()
        return matched


@dataclass(frozen=True)
class Course:
    """How long and how fast a student learns."""

    steps: int = 1500
    labelled: int = 64
    unlabelled: int = 128
    rate: float = 2e-3
    weight_decay: float = 1e-4
    average: float = 0.995
    """The student that is kept is a running mean of its weights."""


def train(
    build: Build,
    inputs: Tensor,
    labels: ArrayLike,
    method: Supervised | Consistency | VirtualAdversarial | FeatureMatching,
    course: Course | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> nn.Module:
    """A student of `inputs`, of which some carry labels.

    Raises:
        InvalidArgument: no input has a label.
    """
    plan = course or Course()
    known = np.asarray(labels, dtype=np.int64)
    chosen = np.flatnonzero(known >= 0)
    if len(known) != len(inputs) or not chosen.size:
        raise InvalidArgument(f"{chosen.size} of {len(inputs)} inputs have a label: want at least one; ask for more")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        game = _Game(method, tuple(inputs.shape[1:]), plan) if isinstance(method, FeatureMatching) else None
        generator = np.random.default_rng([seed, 3])
        mean = copy.deepcopy(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=plan.rate, weight_decay=plan.weight_decay)
        targets = torch.from_numpy(known)
        for number in range(plan.steps):
            done = number / plan.steps
            optimiser.param_groups[0]["lr"] = plan.rate * math.cos(7 / 16 * math.pi * done)
            some = torch.from_numpy(generator.choice(chosen, plan.labelled))
            rest = torch.from_numpy(generator.choice(len(inputs), plan.unlabelled))
            step = Step(model, inputs[some], targets[some], inputs[rest], generator, inputs.dim() == 4, done)
            optimiser.zero_grad(set_to_none=True)
            loss = method.loss(step) if game is None else game.play(step)
            loss.backward()
            optimiser.step()
            _average(mean, model, min(plan.average, (number + 1) / (number + 10)))
            if progress is not None:
                progress(number + 1, plan.steps)
    return mean.eval()


@torch.no_grad()
def probabilities(model: nn.Module, inputs: Tensor, chunk: int = 512) -> NDArray[np.float64]:
    """The model's class probabilities (inputs, classes)."""
    model.eval()
    found = [functional.softmax(model(part).double(), dim=1) for part in torch.split(inputs, chunk)]
    return torch.cat(found).numpy()


def estimated(model: Any, inputs: ArrayLike, classes: int) -> NDArray[np.float64]:
    """An estimator's class probabilities (inputs, classes); 0 for a class it has never seen."""
    table = np.asarray(inputs)
    found = np.zeros((len(table), classes))
    found[:, np.asarray(model.classes_, dtype=np.int64)] = model.predict_proba(table)
    return found


def accuracy(model: nn.Module, inputs: Tensor, labels: ArrayLike) -> float:
    """The share of inputs that the model labels right."""
    return float((probabilities(model, inputs).argmax(axis=1) == np.asarray(labels)).mean())


def doubtful(predicted: NDArray[np.float64], number: int, *, asked: ArrayLike = ()) -> NDArray[np.int64]:
    """The inputs whose two best classes are closest, not yet `asked`: what to ask next. Free: post-processing."""
    check.whole("number", number)
    top = np.sort(predicted, axis=1)
    margin = top[:, -1] - top[:, -2]
    margin[np.asarray(asked, dtype=np.int64)] = np.inf
    order = np.argsort(margin, kind="stable")[:number]
    return order[np.isfinite(margin[order])].astype(np.int64)


def spread(inputs: ArrayLike, number: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Inputs that stand for the others: the ones nearest to `number` cluster centres of the public pool. Free."""
    from sklearn.cluster import MiniBatchKMeans

    flat = np.asarray(inputs, dtype=np.float32).reshape(len(np.asarray(inputs)), -1)
    found = MiniBatchKMeans(number, random_state=seed, n_init=1, batch_size=2048).fit(flat)
    squares = (flat**2).sum(axis=1)
    nearest = [int(np.argmin(squares - 2 * (flat @ centre))) for centre in found.cluster_centers_]
    chosen = sorted(set(nearest))
    spare = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(flat)), chosen))
    return np.array([*chosen, *spare[: number - len(chosen)].tolist()], dtype=np.int64)


def save(model: Any, path: Path, *, bill: dict[str, Any]) -> None:
    """Write the student (safetensors for networks, skops for estimators) with its bill beside it as JSON."""
    target = Path(path)
    if isinstance(model, nn.Module):
        save_file({name: value.detach().contiguous() for name, value in model.state_dict().items()}, str(target))
    else:
        _skops().dump(model, target)
    target.with_suffix(".bill.json").write_text(json.dumps(bill, indent=2) + "\n")


def load(build: Build, path: Path) -> nn.Module:
    """A network that `save` wrote."""
    model = build()
    model.load_state_dict(load_file(str(path)))
    return model.eval()


def load_estimator(path: Path) -> Any:
    """An estimator that `save` wrote. The file cannot run code: it may name scikit-learn's own types only.

    Raises:
        InvalidArgument: it names another type.
    """
    skops = _skops()
    named = skops.get_untrusted_types(file=path)
    if strange := [name for name in named if not name.startswith("sklearn.")]:
        raise InvalidArgument(
            f"{path} holds {', '.join(strange)}: want scikit-learn's types; save such a model yourself"
        )
    return skops.load(path, trusted=named)


def _skops() -> Any:
    try:
        import skops.io
    except ImportError:
        raise MissingExtra("skops", extra="pate") from None
    return skops.io


class _Game:
    """The generator and its optimiser, beside the classifier's."""

    def __init__(self, method: FeatureMatching, shape: tuple[int, ...], course: Course) -> None:
        self.method, self.count = method, course.unlabelled
        self.maker = method.generator(shape)
        self.optimiser = torch.optim.Adam(self.maker.parameters(), lr=method.rate * 3, betas=(0.5, 0.999))

    def play(self, step: Step) -> Tensor:
        """One move of the generator; the loss for the classifier's move."""
        self.optimiser.zero_grad(set_to_none=True)
        self.method.match(step, self._made(step)).backward()
        self.optimiser.step()
        step.model.zero_grad(set_to_none=True)
        return self.method.classify(step, self._made(step).detach())

    def _made(self, step: Step) -> Tensor:
        noise = step.generator.random((self.count, self.method.noise), dtype=np.float32)
        made: Tensor = self.maker(torch.from_numpy(noise))
        return made


def _moved(x: Tensor, warp: float, shift: int, step: Step) -> Tensor:
    if not step.images:
        return x
    most = min(shift, x.shape[-1] // 9)  # a shift of two pixels is much in a small image
    return shifted(warped(x, warp, step.generator), most, step.generator)


def _unit(direction: Tensor) -> Tensor:
    length = direction.flatten(1).norm(dim=1).clamp_min(1e-12)
    unit: Tensor = direction / length.view(-1, *[1] * (direction.dim() - 1))
    return unit


@torch.no_grad()
def _average(mean: nn.Module, model: nn.Module, keep: float) -> None:
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - keep)
    for kept, now in zip(mean.buffers(), model.buffers(), strict=True):
        kept.copy_(now)
