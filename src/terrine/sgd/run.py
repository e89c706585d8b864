"""One private run over an ordinary loop: what hooks on the model and the optimizer do with the lot that is out.

While a lot is out, the isolation check follows every torch call on it: a backward pass from anything that mixes
examples is refused, in any lot, and from a loss it tells a mean from a sum. Before `optimizer.step` the clipped sum,
with its noise, takes the gradients' place. A step without a lot, a second one, or one after the plan's last is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping import Recorder
from terrine.sgd.clipping.axis import Unfollowed
from terrine.sgd.clipping.chunks import within
from terrine.sgd.clipping.examples import is_unwatched, tensors
from terrine.sgd.clipping.trial import misunderstood
from terrine.sgd.isolation import Isolation
from terrine.sgd.lots import FIRST, Piece
from terrine.sgd.step import Step


class Run:
    """One private run: what it is to do with the lot that was handed out."""

    def __init__(
        self,
        step: Step,
        optimizer: Optimizer,
        recorder: Recorder | None,
    ) -> None:
        self.step, self.optimizer, self.recorder = step, optimizer, recorder
        self.checkpoint: Checkpoint | None = None
        self._loop: object = None
        self._closed: str | None = None  # why there are no further steps
        self._done = False
        self._piece: Piece | None = None  # that waits for its step
        self._last = False
        self._given = False  # the model was given the lot that is out
        self._aside = False  # a forward pass that could only train, while there is no lot
        self._isolation: Isolation | None = None  # of the lot that is out
        self._mean: bool | None = None  # whether the losses of this run are means
        self._hooks = [optimizer.register_step_pre_hook(self._before_step)]
        if recorder is not None:
            recorder.scale = self._scale
            # Around the recorder's hooks: it sees neither watched tensors nor a lot without rows.
            before = step.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            self._hooks.append(before)
            self._hooks.append(step.model.register_forward_hook(self._after_forward))

    def enter(self) -> object:
        """A loop over the lots begins, and ends any other; a lot that was not stepped on is used up.

        Raises:
            OutOfOrder: the run was closed.
        """
        if self._closed is not None:
            raise OutOfOrder(f"lots: {self._closed}; want a run of its own, by make_private")
        self.step.skip()
        self.release()
        self._piece = None
        self._loop = object()
        return self._loop

    def check(self, loop: object) -> None:
        """Refuse to go on with a loop that another has ended.

        Raises:
            OutOfOrder: it has.
        """
        if loop is not self._loop:
            why = self._closed or "another loop over them has begun since"
            raise OutOfOrder(f"lots: {why}; want one loop at a time")

    def release_from(self, loop: object) -> None:
        """A loop is over, or was broken off."""
        if loop is self._loop:
            self.release()

    def begin(self, batch: Any, piece: Piece, *, first: bool = True) -> Any:
        """Hand out a piece of a lot."""
        self._piece, self._last = piece, piece.last
        if first:
            self.step.begin()
        if self.recorder is None:
            return batch
        self.recorder.discard()
        self.recorder.clip = self.step.rule
        self.release()
        if piece.size:
            self._isolation = self.recorder.isolation = Isolation(piece.size, self.step.model)
            self._isolation.mark(batch)
            self._isolation.__enter__()
        return batch

    def release(self) -> None:
        """The lot that was out is back: nobody follows it any more."""
        if self._isolation is not None:
            self._isolation.__exit__(None, None, None)
            self._isolation = None
        if self.recorder is not None:
            self.recorder.isolation = None

    def fitting(self, memory: float) -> int:
        """How many examples about fit into so many bytes, as the last piece had it."""
        seen = None if self.recorder is None else self.recorder.measured
        return FIRST if seen is None else within(memory, *seen)

    def finish(self) -> None:
        """A piece is over; where the loop took no step, or one that failed, the lot counts as used all the same."""
        self.release()
        if self._last:
            self.step.skip()
        if self._piece is not None and self.recorder is not None:
            self.recorder.discard()
        self._piece = None
        if self.checkpoint is not None:
            self.checkpoint.after_step(self)

    def done(self) -> None:
        """There are no more lots."""
        self._leave()
        if self.checkpoint is not None and not self._done:
            self.checkpoint.after_run(self)
        self._done = True

    def close(self, why: str) -> None:
        """Leave the model, and take no further step."""
        self.release()
        self._leave()
        self._piece, self._loop, self._closed = None, None, why

    def __deepcopy__(self, _memo: Any) -> Run:
        """Itself: hooks are copied with a model, and do nothing for the copy."""
        return self

    def _leave(self) -> None:
        """Take what watches off the model; a lot that is still out is followed to its end."""
        for hook in self._hooks[1:]:
            hook.remove()
        del self._hooks[1:]
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise InvalidArgument("optimizer.step(closure): want step() without one; a closure would look again")
        over = self.step.taken >= self.step.limit
        if self._piece is None or over:
            done = f"all {self.step.limit} steps of the plan are taken"
            why = done if over else self._closed or "no lot has been handed out"
            raise OutOfOrder(f"optimizer.step(): {why}; want one step for each lot")
        self.step.check_parameters(optimizer)
        piece, self._piece = self._piece, None
        with self._aside_of_the_lot():
            if self.recorder is not None:
                self.step.add(self._clipped(piece))
            if piece.last:
                self.step.release(optimizer)
                if self.step.taken >= self.step.limit:
                    self._leave()
            else:
                self.step.withhold()

    def _clipped(self, piece: Piece) -> Any:
        assert self.recorder is not None
        if piece.size == 0:
            self.recorder.discard()
            return None
        self._settle(piece)
        clipped = self.recorder.collect(scale=self._undoing(piece))
        if len(clipped.norms) > piece.size:
            raise InvalidArgument(
                f"a lot of {piece.size} examples went backward as {len(clipped.norms)}: each may count once; want one "
                "backward pass for all losses of an example"
            )
        return clipped

    def _settle(self, piece: Piece) -> None:
        """Find whether the losses are means, once for the run."""
        mean = None if self._isolation is None else self._isolation.mean
        if mean is None and self.recorder is not None:
            self.recorder.discard()
            raise InvalidArgument(
                "no backward pass from the lot's loss was seen before optimizer.step(): want loss.backward(), on a "
                "loss made of the lot by torch alone"
            )
        if piece.size > 1:
            if self._mean not in (None, mean):
                raise InvalidArgument(
                    "the loss was a mean over the examples in one lot, and a sum in another; want the same in all, "
                    'such as reduction="mean" or "sum"'
                )
            self._mean = mean

    def _undoing(self, piece: Piece) -> float:
        """What undoes a mean."""
        return float(piece.size) if self._isolation is not None and self._isolation.mean else 1.0

    def _scale(self) -> float | None:
        """What undoes the loss's reduction, if that is known in the middle of the backward pass."""
        return None if self._piece is None else self._undoing(self._piece)

    @contextmanager
    def _aside_of_the_lot(self) -> Iterator[None]:
        """What is computed inside is ours: it is not followed."""
        if self._isolation is None:
            yield
            return
        with self._isolation.paused():
            yield

    def _is_watching(self, module: nn.Module) -> bool:
        return module is self.step.model and torch.is_grad_enabled() and not is_unwatched()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Prepare the model for what it was given, where that is the lot that was handed out."""
        self._given = self._aside = False
        if not self._is_watching(module):
            return None
        leaves = tensors((args, kwargs))
        if self._piece is None:
            self._aside = module.training and not any(leaf.requires_grad for leaf in leaves)
            return None
        rows = next((len(leaf) for leaf in leaves if leaf.dim()), -1)
        if not module.training and rows != self._piece.size:
            return None  # a look at other data on the way
        with self._aside_of_the_lot():
            if (
                self._piece.size == 0
            ):  # many models cannot take a lot without rows: they get one of zeros, cut off again
                args, kwargs = tree_map(_one_row, (args, kwargs))
            elif self._mean is None:
                reason = misunderstood(module, self.step.parameters, args, kwargs, self._piece.size)
                if reason:
                    raise Unfollowed(f"{reason}; sgd.clipped_sum and sgd.Trainer clip it slowly, but exactly")
        self._given = True
        return args, kwargs

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if not self._is_watching(module):
            return None
        if self._aside:
            for leaf in tensors(output):
                if leaf.requires_grad:
                    leaf.register_hook(_refuse_aside)
        if self._piece is None or not self._given:
            return None
        leaves, size = tensors(output), self._piece.size
        if size == 0:
            return tree_map(lambda leaf: leaf[:0] if _has_rows(leaf, 1) else leaf, output)
        if not any(_has_rows(leaf, size) for leaf in leaves):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise InvalidArgument(
                f"the model's output has shape {shapes}: want the lot's {size} examples as its first dimension"
            )
        return None


def _refuse_aside(_: Tensor) -> None:
    raise OutOfOrder(
        "loss.backward(): no lot has been handed out, and the private run on this model keeps every gradient; want "
        "the loop over its lots, or lots.close() to end it"
    )


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def _one_row(leaf: Any) -> Any:
    return leaf.new_zeros(1, *leaf.shape[1:]) if _has_rows(leaf, 0) else leaf
