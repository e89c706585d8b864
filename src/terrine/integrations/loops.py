"""What the loops of other libraries share: lots that they carry without seeing into them, and losses of one example.

A library's loop asks a loader for batches, a function for the loss and an optimizer for the step. Here the loader hands
out sealed lots, the function that the library calls a training step becomes the program that every example runs alone
(`torch.vmap`), and the optimizer's step releases the noisy sum. What the loop, its callbacks and loggers can see
between the three is public, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from terrine.errors import OutOfOrder
from terrine.sgd.clipping.examples import tensors
from terrine.sgd.plan import Plan
from terrine.sgd.private import Lots
from terrine.sgd.views import clipped_views


class SealedLot(dict[str, Any]):
    """A lot on its way through another library's loop, which sees a dictionary without entries."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._batch = batch

    def opened(self) -> Any:
        """The lot itself, once."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise OutOfOrder("the lot was used already: want one training step for each")
        return batch


class Epochs:
    """The lots of one run, an epoch at a time, for loops that count epochs; a run that goes on begins inside one.

    `begin` starts the run at the first loop over its lots, when the library has made everything else ready.
    """

    def __init__(self, begin: Callable[[], Lots], plan: Plan) -> None:
        self._begin, self._per_epoch = begin, min(steps_per_epoch(plan), plan.steps)
        self.lots: Lots | None = None
        self._each: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[SealedLot]:
        if self.lots is None:
            self.lots = self._begin()
            self._each = iter(self.lots)
        step = self.lots.run.step
        for _ in range(self._per_epoch - step.taken % self._per_epoch):
            if step.taken >= step.limit:
                return
            yield SealedLot(next(self._each))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the private run keeps where it is itself."""
        return {}

    def load_state_dict(self, _: Any) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Finish the run after the plan's last step, so that its secrets are removed; leave it, if that is not yet."""
        if self.lots is None:
            return
        if self.lots.run.step.taken >= self.lots.run.step.limit:
            next(self._each, None)
        self.lots.close()


def steps_per_epoch(plan: Plan) -> int:
    """How many lots are drawn until, on average, every example was."""
    return plan.sampling.steps(1.0, examples=plan.examples, lot=plan.lot)


class Loss(nn.Module):
    """A model whose output for a lot is the loss that `loss` computes with it."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(batch)


def add_clipped(lots: Lots, loss: Loss, batch: Any, memory: float | None) -> None:
    """Add a lot's clipped gradients to the step, each of the loss of a lot of this example alone."""
    rows = tensors((batch,))
    if not rows:
        raise OutOfOrder("a lot without tensors: want a collate function that makes some")
    if len(rows[0]):
        step = lots.run.step
        step.add(clipped_views(loss, _itself, (batch,), rows[0], clip=step.rule, memory=memory))


def withheld(device: torch.device | None = None) -> Tensor:
    """What a loop is told for the loss of a lot, which is private."""
    return torch.full((), torch.nan, device=device)


def _itself(output: Tensor, _: Any) -> Tensor:
    return output
