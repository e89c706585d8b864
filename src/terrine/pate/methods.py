"""How a student learns in one step.

Supervised          cross-entropy on the labelled inputs
Consistency         [SBL20] [TV17] what the mean of the weights is sure of on lightly moved inputs teaches heavily
                    moved ones
VirtualAdversarial  [MMK18] predictions must not change in the direction that changes them most
FeatureMatching     [SGZ16] PATE-G: a generator's images join as one more class; the generator matches mean features
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from terrine.pate.moves import cut, warped


class Method(Protocol):
    """How one step learns."""

    def loss(self, step: MethodStep) -> Tensor:
        """What the step makes smaller."""


@dataclass(frozen=True)
class MethodStep:
    """What a method sees in one step."""

    model: nn.Module
    mean: nn.Module
    """The running mean of the model's weights."""
    labelled: Tensor
    labels: Tensor
    unlabelled: Tensor
    generator: np.random.Generator
    images: bool
    done: float
    """The share of the training that is behind."""


@dataclass(frozen=True)
class Supervised:
    """Cross-entropy on the labelled inputs, images lightly moved."""

    warp: float = 1.0
    shift: float = 2.0
    bend: float = 0.0

    def loss(self, step: MethodStep) -> Tensor:
        x = _moved(step.labelled, self.warp, self.shift, step, bend=self.bend)
        return functional.cross_entropy(step.model(x), step.labels, label_smoothing=0.05)


@dataclass(frozen=True)
class Consistency:
    """What the running mean of the model is sure of on an input, the model should say when the input is moved a lot.

    Answers are noisy: once `trust` of the training is over, an answer that the mean is sure is wrong is left out.
    """

    weight: float = 1.0
    sure: float = 0.95
    warp: float = 1.5
    shift: float = 3.0
    bend: float = 1.0
    cut: float = 0.0
    trust: float = 0.3

    def loss(self, step: MethodStep) -> Tensor:
        labelled = _moved(step.labelled, 0.7, 2, step)
        weak = _moved(step.unlabelled, 0.3, 1, step)
        strong = _moved(step.unlabelled, self.warp, self.shift, step, bend=self.bend, hole=self.cut)
        with torch.no_grad():
            told = functional.softmax(step.mean(torch.cat([weak, labelled])), dim=1)
        (chance, guess), (trust, belief) = told[: len(weak)].max(dim=1), told[len(weak) :].max(dim=1)
        logits = step.model(torch.cat([labelled, strong]))
        known, other = logits[: len(labelled)], logits[len(labelled) :]
        taught = functional.cross_entropy(other, guess, reduction="none") * (chance >= self.sure)
        supervised = functional.cross_entropy(known, step.labels, reduction="none")
        if step.done > self.trust:
            supervised = supervised * ((belief == step.labels) | (trust < self.sure))
        return supervised.mean() + self.weight * min(1.0, 5 * step.done) * taught.mean()


@dataclass(frozen=True)
class VirtualAdversarial:
    """The prediction must survive a push of length `push` in the worst direction, found by one power iteration."""

    push: float = 2.0
    probe: float = 1e-3
    weight: float = 1.0

    def loss(self, step: MethodStep) -> Tensor:
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

    latent: int = 50
    width: int = 256
    learning_rate: float = 3e-4

    def loss(self, step: MethodStep) -> Tensor:
        """Unused: a game has two losses; `train` plays it."""
        raise NotImplementedError

    def generator(self, shape: tuple[int, ...]) -> nn.Module:
        """From noise to inputs between 0 and 1."""
        return nn.Sequential(
            nn.Linear(self.latent, self.width),
            nn.BatchNorm1d(self.width),
            nn.Softplus(),
            nn.Linear(self.width, self.width),
            nn.BatchNorm1d(self.width),
            nn.Softplus(),
            nn.Linear(self.width, math.prod(shape)),
            nn.Sigmoid(),
            nn.Unflatten(1, shape),
        )

    def classify(self, step: MethodStep, made: Tensor) -> Tensor:
        """The classifier's loss: right classes, real inputs real, made ones not."""
        known = step.model(_moved(step.labelled, 0.7, 2, step))
        real, false = (torch.logsumexp(step.model(x), dim=1) for x in (step.unlabelled, made))
        doubt = -0.5 * (real - functional.softplus(real)).mean() + 0.5 * functional.softplus(false).mean()
        return functional.cross_entropy(known, step.labels) + doubt

    def match(self, step: MethodStep, made: Tensor) -> Tensor:
        """The generator's loss: mean features of made inputs as of real ones."""
        inner = step.model[:-1] if isinstance(step.model, nn.Sequential) else step.model
        gap = inner(step.unlabelled).mean(dim=0).detach() - inner(made).mean(dim=0)
        matched: Tensor = gap.square().mean()
        return matched


class Game:
    """The generator and its optimiser, beside the classifier's."""

    def __init__(self, method: FeatureMatching, shape: tuple[int, ...], count: int) -> None:
        self.method, self.count = method, count
        self.maker = method.generator(shape)
        self.optimiser = torch.optim.Adam(self.maker.parameters(), lr=method.learning_rate * 3, betas=(0.5, 0.999))

    def play(self, step: MethodStep) -> Tensor:
        """One move of the generator; the loss for the classifier's move."""
        self.optimiser.zero_grad(set_to_none=True)
        self.method.match(step, self._made(step)).backward()
        self.optimiser.step()
        step.model.zero_grad(set_to_none=True)
        return self.method.classify(step, self._made(step).detach())

    def _made(self, step: MethodStep) -> Tensor:
        noise = step.generator.random((self.count, self.method.latent), dtype=np.float32)
        made: Tensor = self.maker(torch.from_numpy(noise))
        return made


def _moved(x: Tensor, warp: float, shift: float, step: MethodStep, *, bend: float = 0.0, hole: float = 0.0) -> Tensor:
    if not step.images:
        return x
    size = x.shape[-1]  # a shift of two pixels is much in a small image
    moved = warped(x, warp, step.generator, shift=min(shift, size // 9), bend=min(bend, size / 28))
    return cut(moved, hole, step.generator)


def _unit(direction: Tensor) -> Tensor:
    length = direction.flatten(1).norm(dim=1).clamp_min(1e-12)
    unit: Tensor = direction / length.view(-1, *[1] * (direction.dim() - 1))
    return unit
