"""Canaries for an audit inside an ordinary private training: nothing is trained twice.

Gradient canaries ("Dirac" canaries of [NHS23, SNJ23]): canary i stands for an example whose clipped gradient is the
full clipping bound along one coordinate of the model. It falls into lots as any example does, if its coin says so.
The attacker watches the released gradients and knows all other examples and when they were drawn, as the guarantee
allows. Beyond what the others explain, a release shows x = 1 + noise at the coordinate of a canary that was drawn, in
clipping bounds, and noise alone otherwise. The score adds up how much likelier each x is for a canary that is in, drawn
with the sampling rate q, than for one that is out: ln(1 - q + q e^((x - 1/2) / noise^2)); without noise, it adds up x.

    steps = sgd.private_steps(model, optimizer, data, plan, loss=loss)
    canaries = Canaries.insert(steps, count=500)
    for step in steps:
        optimizer.step()                               # the loop as it was
    evidence = canaries.evidence(confidence=0.95)      # audit.verdict(plan.event, evidence)

A `sgd.Trainer` takes them by `history, canaries = Canaries.fit(trainer, data, count=500)`.

Mislabelled canaries (`mislabelled`) need no access to gradients: they are examples with a wrong label, in or out of
the training set by a coin each, scored by the trained model's loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terrine import check
from terrine.audit import one_run
from terrine.audit.scores import Flags, Floats
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd import distributed
from terrine.sgd.clipping import Clipped
from terrine.sgd.release import StepRelease
from terrine.sgd.run import PrivateSteps
from terrine.sgd.sampling import Poisson
from terrine.sgd.trainer import History, Trainer


class Canaries:
    """Gradient canaries in one run: which are in, their coordinates, and the scores so far."""

    def __init__(
        self, release: StepRelease, included: Flags, places: NDArray[np.int64], generator: np.random.Generator
    ) -> None:
        self.included, self._generator = included, generator
        ends = np.cumsum([parameter.numel() for parameter in release.parameters.values()])
        owner = np.searchsorted(ends, places, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        self._where = {
            name: (np.flatnonzero(owner == number), torch.from_numpy(places[owner == number] - starts[number]))
            for number, name in enumerate(release.parameters)
        }
        self.scores: Floats = np.zeros(included.size)
        self._known: dict[str, Tensor] = {}
        self._bound, self._seen = 1.0, 0

    @classmethod
    def insert(
        cls, steps: PrivateSteps, *, count: int, included: Flags | None = None, seed: int | None = None
    ) -> Canaries:
        """Insert `count` canaries, each in by a fair coin from the operating system; a `seed` is for tests.

        Raises:
            InvalidArgument: more canaries than coordinates, or lots that are not Poisson.
            OutOfOrder: training has begun.
        """
        release = steps.release
        size = sum(parameter.numel() for parameter in release.parameters.values())
        if check.whole("count", count) > size:
            raise check.refuse("count", count, f"at most one to a coordinate, {size}")
        if not isinstance(release.plan.sampling, Poisson):
            raise InvalidArgument(
                f"{type(release.plan.sampling).__name__} lots: want Poisson lots; a coin adds an example"
            )
        if release.taken:
            raise OutOfOrder(f"canaries after {release.taken} steps: want them inserted before the first")
        generator = np.random.default_rng(seed)
        if included is None:
            included = one_run.coins(count) if seed is None else generator.random(count) < 0.5
        if included.shape != (count,):
            raise InvalidArgument(f"included: shape {included.shape}; want one flag for each of {count} canaries")
        canaries = cls(release, included, generator.permutation(size)[:count].astype(np.int64), generator)
        steps.observer = canaries
        return canaries

    @classmethod
    def fit(
        cls, trainer: Trainer, dataset: Any, *, count: int, person: Any = None, seed: int | None = None
    ) -> tuple[History, Canaries]:
        """Have `trainer` fit `dataset` with `count` canaries among it; `person` as `Trainer.fit` takes it."""
        inserted: list[Canaries] = []
        history = trainer.fit(
            dataset, person=person, on_start=lambda steps: inserted.append(cls.insert(steps, count=count, seed=seed))
        )
        return history, inserted[0]

    def evidence(self, *, confidence: float = 0.95) -> one_run.OneRun:
        """Guess which canaries were in, and say what that proves.

        Raises:
            OutOfOrder: no step has been taken with the canaries.
        """
        if not self._seen:
            raise OutOfOrder("canaries: no step was taken; want a loop over the steps")
        return one_run.guess(self.scores, self.included, confidence=confidence)

    def join(self, release: StepRelease) -> None:
        """A lot is complete: the canaries that were drawn join it."""
        self._known = {
            name: self._gathered(release.sums.get(name), places) for name, (_, places) in self._where.items()
        }
        self._bound = release.rule.bound
        if distributed.is_first():  # once to a lot, whatever processes it is spread over
            release.add(self._contribution(release))

    def watch(self, release: StepRelease) -> None:
        """Score every canary by what was released at its coordinate."""
        self._seen += 1
        plan = release.plan
        for name, (owned, places) in self._where.items():
            gradient = release.parameters[name].grad
            if gradient is not None and len(owned):
                noisy = plan.lot * gradient.detach().reshape(-1)[places].double()
                excess = (noisy - self._known[name]).numpy() / self._bound
                self.scores[owned] += _evidence(excess, plan.rate, plan.noise)

    def _contribution(self, release: StepRelease) -> Clipped:
        drawn = self.included & (self._generator.random(self.included.size) < release.plan.rate)
        sums: dict[str, Tensor] = {}
        for name, (owned, places) in self._where.items():
            parameter = release.parameters[name]
            total = torch.zeros(parameter.numel(), dtype=torch.promote_types(parameter.dtype, torch.float32))
            total[places] = self._bound * torch.from_numpy(drawn[owned]).to(total.dtype)
            sums[name] = total.view(parameter.shape)
        return Clipped(sums, torch.full((int(drawn.sum()),), self._bound))

    @staticmethod
    def _gathered(total: Tensor | None, places: Tensor) -> Tensor:
        """What the examples of all processes add up to at some places."""
        own = torch.zeros(len(places)) if total is None else total.reshape(-1)[places]
        return distributed.summed(own.clone()).double()


def _evidence(seen: Floats, rate: float, noise: float) -> Floats:
    """How much likelier a release is for a canary that is in than for one that is out, in logarithms."""
    if not noise:
        return seen
    ratio = (seen - 0.5) / noise**2
    with np.errstate(divide="ignore"):  # a rate of 1: whoever is in is always drawn
        result: Floats = np.logaddexp(np.log1p(-rate), np.log(rate) + ratio)
    return result


def mislabelled(labels: Tensor, *, canaries: NDArray[np.int64], classes: int, seed: int = 0) -> Tensor:
    """`labels` with a wrong class, chosen at random, for each of `canaries`."""
    classes = check.whole("classes", classes, at_least=2)
    moved = np.random.default_rng(seed).integers(1, classes, size=len(canaries))
    changed = labels.clone()
    chosen = torch.from_numpy(np.asarray(canaries, dtype=np.int64))
    changed[chosen] = (labels[chosen] + torch.from_numpy(moved)) % classes
    return changed
