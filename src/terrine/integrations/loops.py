"""What the loops of other libraries share: lots that they carry without seeing into them, and losses of one example.

A library's loop asks a loader for batches, a function for the loss and an optimizer for the step. Here the loader hands
out sealed lots, the function that the library calls a training step becomes the program that every example runs alone
(`torch.vmap`), and the optimizer's step releases the noisy sum. What the loop, its callbacks and loggers can see
between the three is public, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.clipping.examples import tensors
from terrine.sgd.plan import Plan
from terrine.sgd.private import Lots
from terrine.sgd.views import clipped_views


class SealedLot(dict[str, Any]):
    """A lot on its way through another library's loop, which sees a dictionary without entries."""

    def __init__(self, batch: Any, epochs: Epochs) -> None:
        super().__init__()
        self._batch, self._epochs = batch, epochs

    def opened(self) -> Any:
        """The lot itself: once, and only while it is the one that waits for its step.

        Raises:
            OutOfOrder: it was used, or the loop has gone on to another: two lots in one step could hold one example.
        """
        if self._epochs.out is not self:
            raise OutOfOrder("the lot was used already, or another one is out: want one training step for each lot")
        self._epochs.out, batch, self._batch = None, self._batch, None
        return batch


class Epochs:
    """The lots of one run, an epoch at a time, for loops that count epochs; a run that goes on begins inside one.

    `begin` starts the run at the first loop over its lots, when the library has made everything else ready.
    """

    def __init__(self, begin: Callable[[], Lots], plan: Plan) -> None:
        self._begin, self._per_epoch = begin, min(steps_per_epoch(plan), plan.steps)
        self.lots: Lots | None = None
        self.out: SealedLot | None = None  # that waits for its step
        self._each: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[SealedLot]:
        if self.lots is None:
            self.lots = self._begin()
            self._each = iter(self.lots)
        step = self.lots.run.step
        if step.taken >= step.limit:
            raise OutOfOrder(f"lots: all {step.limit} steps of the plan are taken; want no further epoch")
        for _ in range(min(self._per_epoch - step.taken % self._per_epoch, step.limit - step.taken)):
            self.out = SealedLot(next(self._each), self)
            yield self.out

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
    return plan.sampling.steps(1.0, examples=plan.population, lot=plan.lot)


class Loss(nn.Module):
    """A model whose output for a lot is the loss that `loss` computes with it.

    Raises:
        InvalidArgument: an attribute of one of the `keepers` has changed: it could carry one example to the next, or
            steer the run by one example without noise.
    """

    weighs_examples = True  # trainers' losses are often means over tokens

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor], keepers: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self.model = model
        self._loss, self._keepers = loss, keepers

    def forward(self, batch: Any) -> Tensor:
        keepers = [one for one in self._keepers() if hasattr(one, "__dict__")]
        before = [_marks(one) for one in keepers]
        found = self._loss(batch)
        for keeper, marks in zip(keepers, before, strict=True):
            if changed := sorted(name for name, mark in _marks(keeper).items() if marks.get(name) != mark):
                raise InvalidArgument(
                    f"the loss changes {changed[0]} of {type(keeper).__name__}, by which an example could reach "
                    "another, or decide what the run does; want a loss that keeps nothing and steers nothing"
                )
        return found


def _marks(keeper: Any) -> dict[str, Any]:
    """By which an attribute that was replaced, added to or written into is known, and an optimizer's settings."""
    groups = getattr(keeper, "param_groups", ())
    settings = {
        f"param_groups[{place}]": repr({name: value for name, value in group.items() if name != "params"})
        for place, group in enumerate(groups)
    }
    return settings | {
        name: (
            id(value),
            len(value) if isinstance(value, list | dict | set) else 0,
            value._version if isinstance(value, Tensor) else 0,
        )
        for name, value in vars(keeper).items()
        if name not in _SETTLED
    }


_SETTLED = ("problem_type",)  # which transformers' models find out from the type of labels, the same for all examples


def add_clipped(lots: Lots, loss: Loss, batch: Any, memory: float | None) -> None:
    """Add a lot's clipped gradients to the step, each of the loss of a lot of this example alone.

    Raises:
        InvalidArgument: the lot holds something else than tensors, which every example would see all of.
    """
    leaves = pytree.tree_leaves(batch)
    if strange := sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | None)}):
        raise InvalidArgument(
            f"a lot of tensors and {', '.join(strange)}: every example would see those of all; want tensors alone"
        )
    rows = tensors((batch,))
    if not rows:
        raise InvalidArgument("a lot without tensors: want a collate function that makes some")
    if len(rows[0]):
        step, people = lots.run.step, lots.run.people
        step.add(clipped_views(loss, _itself, (batch,), rows[0], clip=step.rule, memory=memory, rows=people))


def withheld(device: torch.device | None = None) -> Tensor:
    """What a loop is told for the loss of a lot, which is private."""
    return torch.full((), torch.nan, device=device)


def _itself(output: Tensor, _: Any) -> Tensor:
    return output
