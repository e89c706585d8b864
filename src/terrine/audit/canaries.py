"""Canaries for an audit inside an ordinary private training: nothing is trained twice.

Gradient canaries ("Dirac" canaries of [NHS23, SNJ23]): canary i stands for an example whose clipped gradient is the
full clipping bound along one coordinate of the model. It falls into lots as any example does, if its coin says so.
The attacker watches the released gradients and knows all other examples and when they were drawn, as the guarantee
allows. Beyond what the others explain, a release shows x = 1 + noise at the coordinate of a canary that was drawn, in
clipping bounds, and noise alone otherwise. The score adds up how much likelier each x is for a canary that is in, drawn
with the sampling rate q, than for one that is out: ln(1 - q + q e^((x - 1/2) / noise^2)); without noise, it adds up x.

    model, optimizer, lots = sgd.make_private(model, optimizer, data, plan)
    canaries = Canaries.insert(lots, count=500)
    for x, y in lots:
        ...                                            # the loop as it was
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
from torch.optim import Optimizer

from terrine import check
from terrine.audit import one_run
from terrine.audit.scores import Flags, Floats
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd import distributed
from terrine.sgd.clipping import Clipped
from terrine.sgd.private import Lots
from terrine.sgd.sampling import Poisson
from terrine.sgd.training import History, Trainer


class Canaries:
    """Gradient canaries in one run: their coins, their coordinates, and the scores so far."""

    def __init__(self, lots: Lots, included: Flags, places: NDArray[np.int64], generator: np.random.Generator) -> None:
        self._lots, self.included = lots, included
        self._generator = generator
        step = lots.run.step
        ends = np.cumsum([one.numel() for one in step.parameters.values()])
        owner = np.searchsorted(ends, places, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        self._where = {
            name: (np.flatnonzero(owner == number), torch.from_numpy(places[owner == number] - starts[number]))
            for number, name in enumerate(step.parameters)
        }
        self.scores: Floats = np.zeros(included.size)
        self._seen = 0
        self._release = step.release
        step.release = self._released  # type: ignore[method-assign]

    @classmethod
    def insert(cls, lots: Lots, *, count: int, included: Flags | None = None, seed: int | None = None) -> Canaries:
        """`count` canaries, each in by a fair coin from the operating system; a `seed` is for tests.

        Raises:
            InvalidArgument: more canaries than coordinates, or lots that are not Poisson.
            OutOfOrder: training has begun.
        """
        step = lots.run.step
        size = sum(one.numel() for one in step.parameters.values())
        if check.whole("count", count) > size:
            raise check.refuse("count", count, f"at most one to a coordinate, {size}")
        if not isinstance(step.plan.sampling, Poisson):
            raise InvalidArgument(
                f"{type(step.plan.sampling).__name__} lots: want Poisson lots; a coin adds an example"
            )
        if step.taken:
            raise OutOfOrder(f"canaries after {step.taken} steps: want them inserted before the first")
        generator = np.random.default_rng(seed)
        if included is None:
            included = one_run.coins(count) if seed is None else generator.random(count) < 0.5
        if included.shape != (count,):
            raise InvalidArgument(f"included: shape {included.shape}; want one flag for each of {count} canaries")
        return cls(lots, included, generator.permutation(size)[:count].astype(np.int64), generator)

    @classmethod
    def fit(
        cls, trainer: Trainer, dataset: Any, *, count: int, person: Any = None, seed: int | None = None
    ) -> tuple[History, Canaries]:
        """Have `trainer` fit `dataset` with `count` canaries among it; `person` as `Trainer.fit` takes it."""
        inserted: list[Canaries] = []
        train = trainer._train

        def with_canaries(lots: Lots) -> History:
            inserted.append(cls.insert(lots, count=count, seed=seed))
            return train(lots)

        trainer._train = with_canaries  # type: ignore[method-assign]
        try:
            history = trainer.fit(dataset, person=person)
        finally:
            trainer._train = train  # type: ignore[method-assign]
        return history, inserted[0]

    def evidence(self, *, confidence: float = 0.95) -> one_run.OneRun:
        """Guess which canaries were in, and say what that proves.

        Raises:
            OutOfOrder: no step has been taken with the canaries.
        """
        if not self._seen:
            raise OutOfOrder("canaries: no step was taken; want a loop over the lots")
        return one_run.guess(self.scores, self.included, confidence=confidence)

    def _contribution(self) -> Clipped:
        step = self._lots.run.step
        drawn = self.included & (self._generator.random(self.included.size) < step.plan.rate)
        sums: dict[str, Tensor] = {}
        for name, (owned, places) in self._where.items():
            parameter = step.parameters[name]
            total = torch.zeros(parameter.numel(), dtype=torch.promote_types(parameter.dtype, torch.float32))
            total[places] = step.rule.bound * torch.from_numpy(drawn[owned]).to(total.dtype)
            sums[name] = total.view(parameter.shape)
        return Clipped(sums, torch.full((int(drawn.sum()),), step.rule.bound))

    def _released(self, optimizer: Optimizer) -> None:
        """A lot is complete: the canaries join it, and what the step releases is watched."""
        step = self._lots.run.step
        known = {name: self._gathered(step._sums.get(name), places) for name, (_, places) in self._where.items()}
        if distributed.is_first():  # once to a lot, whatever processes it is spread over
            step.add(self._contribution())
        bound = step.rule.bound
        self._release(optimizer)
        self._seen += 1
        for name, (owned, places) in self._where.items():
            released = step.parameters[name].grad
            if released is not None and len(owned):
                noisy = step.plan.lot * released.detach().reshape(-1)[places].double()
                self.scores[owned] += _evidence((noisy - known[name]).numpy() / bound, step.plan.rate, step.plan.noise)

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
