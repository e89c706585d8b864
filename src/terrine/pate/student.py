"""The student: an ordinary model, trained on public inputs and the answers that were paid for.

Whatever a student does with answers is post-processing: training longer, choosing what to ask next by its own doubts,
or learning from inputs nobody labelled costs nothing. `labels` holds a class for each input, or -1 (`ABSTAINED`).
The ways to learn are in `methods`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from torch import Tensor, nn
from torch.nn import functional

from terrine import check, files
from terrine.errors import InvalidArgument, MissingExtra
from terrine.pate.methods import Consistency, FeatureMatching, Game, Method, MethodStep, Supervised, VirtualAdversarial

__all__ = [
    "Consistency",
    "Course",
    "FeatureMatching",
    "Supervised",
    "VirtualAdversarial",
    "accuracy",
    "agreed",
    "compared",
    "doubtful",
    "estimated",
    "load",
    "load_estimator",
    "probabilities",
    "save",
    "spread",
    "train",
]

Build = Callable[[], nn.Module]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Course:
    """How long and how fast a student learns."""

    steps: int = 1500
    labelled: int = 48
    unlabelled: int = 96
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    average: float = 0.99
    """The student that is kept is a running mean of its weights."""


def train(
    build: Build,
    inputs: Tensor,
    labels: ArrayLike,
    method: Method | FeatureMatching,
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
    targets = torch.from_numpy(known)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        if inputs.dim() == 4:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        game = Game(method, tuple(inputs.shape[1:]), plan.unlabelled) if isinstance(method, FeatureMatching) else None
        generator = np.random.default_rng([seed, 3])
        mean = copy.deepcopy(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
        for number in range(plan.steps):
            done = number / plan.steps
            optimiser.param_groups[0]["lr"] = plan.learning_rate * math.cos(7 / 16 * math.pi * done)
            some = torch.from_numpy(generator.choice(chosen, plan.labelled))
            rest = torch.from_numpy(generator.choice(len(inputs), plan.unlabelled))
            step = MethodStep(
                model, mean, inputs[some], targets[some], inputs[rest], generator, inputs.dim() == 4, done
            )
            optimiser.zero_grad(set_to_none=True)
            loss = method.loss(step) if game is None else game.play(step)
            loss.backward()
            optimiser.step()
            _average(mean, model, min(plan.average, (number + 1) / (number + 10)))
            if progress is not None:
                progress(number + 1, plan.steps)
    return mean.eval()


@dataclass(frozen=True)
class Agreement:
    """How far two students of disjoint halves of the answers agree."""

    with_each_other: float
    """On all public inputs."""
    with_answers: float
    """Of each with the half of the answers that it has not seen."""


def compared(
    build: Build,
    inputs: Tensor,
    labels: ArrayLike,
    method: Method | FeatureMatching,
    course: Course | None = None,
    *,
    seed: int = 0,
) -> Agreement:
    """A score for choosing a method and its settings from nothing but public inputs and answers. Free.

    Two students learn from a half of the answers each. What they disagree on, one of them has wrong.
    """
    known = np.asarray(labels, dtype=np.int64)
    order = np.random.default_rng([seed, 4]).permutation(np.flatnonzero(known >= 0))
    halves = order[::2], order[1::2]
    told = []
    for number, half in enumerate(halves):
        some = np.full(len(known), -1, dtype=np.int64)
        some[half] = known[half]
        model = train(build, inputs, some, method, course, seed=2 * seed + number)
        told.append(probabilities(model, inputs).argmax(axis=1))
    unseen = [told[1 - number][half] == known[half] for number, half in enumerate(halves)]
    return Agreement(float((told[0] == told[1]).mean()), float(np.concatenate(unseen).mean()))


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


def agreed(models: Sequence[nn.Module], inputs: Tensor, *, sure: float = 0.8) -> NDArray[np.int64]:
    """Labels for public inputs by the mean probability of several students, where it is above `sure`; -1 elsewhere.

    Answers for another student, at no cost: it learns from all of the pool what they learned from a few labels.
    """
    mean = np.mean([probabilities(model, inputs) for model in models], axis=0)
    return np.where(mean.max(axis=1) > check.half_open_unit("sure", sure), mean.argmax(axis=1), -1).astype(np.int64)


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
        tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
        content: bytes = as_bytes(tensors)
    else:
        content = _skops().dumps(model)
    files.write(target, content, private=False)
    files.write(target.with_suffix(".bill.json"), json.dumps(bill, indent=2) + "\n", private=False)


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


@torch.no_grad()
def _average(mean: nn.Module, model: nn.Module, keep: float) -> None:
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - keep)
    for kept, now in zip(mean.buffers(), model.buffers(), strict=True):
        kept.copy_(now)
