"""One private run over an ordinary loop: what hooks on the model and the optimizer do with the lot that is out.

Before the forward pass the model is given the lot as it is; after it, outputs of the first lot remember what is done
with them, until `backward` has told a mean from a sum; before `optimizer.step` the clipped sum, with its noise, takes
the gradients' place. A step without a lot, a second one, or one after the plan's last is refused.
"""

from __future__ import annotations

from collections.abc import Callable
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
from terrine.sgd.lots import FIRST, Piece
from terrine.sgd.reduction import Reduction, Tape, Watched, is_loss, of_criterion, of_model, plain
from terrine.sgd.step import Step


class Run:
    """One private run: what it is to do with the lot that was handed out."""

    def __init__(
        self,
        step: Step,
        optimizer: Optimizer,
        recorder: Recorder | None,
        criterion: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        self.step, self.optimizer, self.recorder = step, optimizer, recorder
        self.checkpoint: Checkpoint | None = None
        self._criterion = criterion
        self._loop: object = None
        self._closed: str | None = None  # why there are no further steps
        self._done = False
        self._piece: Piece | None = None  # that waits for its step
        self._last = False
        self._target: Any = None
        self._given: tuple[Any, Any] | None = None
        self._aside = False  # a forward pass that could only train, while there is no lot
        self._tape: Tape | None = None
        self._reduction: Reduction | None = None
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
        self._piece = self._tape = None
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

    def begin(self, batch: Any, piece: Piece, *, first: bool = True) -> Any:
        """Hand out a piece of a lot."""
        self._piece, self._last = piece, piece.last
        if first:
            self.step.begin()
        if self.recorder is None:
            return batch
        self.recorder.discard()
        self.recorder.clip = self.step.rule
        if self._reduction is not None or piece.size < 2:
            return batch
        self._tape = Tape(piece.size)
        self._target = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        return self._tape.watch(batch)

    def fitting(self, memory: float) -> int:
        """How many examples about fit into so many bytes, as the last piece had it."""
        seen = None if self.recorder is None else self.recorder.measured
        return FIRST if seen is None else within(memory, *seen)

    def finish(self) -> None:
        """A piece is over; where the loop took no step, or one that failed, the lot counts as used all the same."""
        if self._last:
            self.step.skip()
        if self._piece is not None and self.recorder is not None:
            self.recorder.discard()
        self._piece = self._tape = None
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
        self._leave()
        self._piece, self._loop, self._closed = None, None, why

    def __deepcopy__(self, _memo: Any) -> Run:
        """Itself: hooks are copied with a model, and do nothing for the copy."""
        return self

    def _leave(self) -> None:
        """Take what watches off the model."""
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
        if self.recorder is not None:
            self.step.add(self._clipped(piece))
        if piece.last:
            if self.checkpoint is not None:
                self.checkpoint.before_release(self)
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
        if self._tape is not None:
            self._reduction, self._tape = self._tape.found, None
            if self._reduction is None:
                self.recorder.discard()
                raise InvalidArgument(
                    "the loss could not be followed from the model's output to loss.backward(); "
                    "want make_private(..., criterion=criterion) to tell a mean from a sum"
                )
        clipped = self.recorder.collect(scale=_undoing(self._reduction, piece))
        if len(clipped.norms) > piece.size:
            raise InvalidArgument(
                f"a lot of {piece.size} examples went backward as {len(clipped.norms)}: each may count once; want one "
                "backward pass for all losses of an example"
            )
        return clipped

    def _scale(self) -> float | None:
        """What undoes the loss's reduction, if that is known in the middle of the backward pass."""
        reduction = self._reduction if self._tape is None else self._tape.found
        if self._piece is None or (reduction is None and self._tape is not None):
            return None
        return _undoing(reduction, self._piece)

    def _is_watching(self, module: nn.Module) -> bool:
        return module is self.step.model and torch.is_grad_enabled() and not is_unwatched()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Prepare the model for what it was given, where that is the lot that was handed out."""
        self._given, self._aside = None, False
        if not self._is_watching(module):
            return None
        leaves = tensors((args, kwargs))
        if self._piece is None:
            self._aside = module.training and not any(leaf.requires_grad for leaf in leaves)
            return None
        rows = next((len(leaf) for leaf in leaves if leaf.dim()), -1)
        if not module.training and rows != self._piece.size:
            return None  # a look at other data on the way
        if any(isinstance(leaf, Watched) for leaf in leaves):
            if self._tape is not None:
                self._tape.check_inputs((args, kwargs))
            args, kwargs = plain((args, kwargs))
        if self._piece.size == 0:  # many models cannot take a lot without rows: they get one of zeros, cut off again
            args, kwargs = tree_map(_one_row, (args, kwargs))
        elif self._tape is not None:
            reason = misunderstood(module, self.step.parameters, args, kwargs, self._piece.size)
            if reason:
                raise Unfollowed(f"{reason}; sgd.Trainer and sgd.clipped_sum clip such a model slowly, but exactly")
        self._given = (args, kwargs)
        return args, kwargs

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if not self._is_watching(module):
            return None
        if self._aside:
            for leaf in tensors(output):
                if leaf.requires_grad:
                    leaf.register_hook(_refuse_aside)
        if self._piece is None or self._given is None:
            return None
        leaves, size = tensors(output), self._piece.size
        if size == 0:
            return tree_map(lambda leaf: leaf[:0] if _has_rows(leaf, 1) else leaf, output)
        if not any(_has_rows(leaf, size) for leaf in leaves):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise InvalidArgument(
                f"the model's output has shape {shapes}: want the lot's {size} examples as its first dimension"
            )
        if self._tape is None:
            return None
        if self._criterion is not None:
            self._tape.found = of_criterion(self._criterion, output, plain(self._target), size)
        elif any(is_loss(leaf) for leaf in leaves):
            self._tape.found = of_model(module, *self._given, size)
        else:
            return self._tape.watch(output, output=True)
        return None


def _refuse_aside(_: Tensor) -> None:
    raise OutOfOrder(
        "loss.backward(): no lot has been handed out, and the private run on this model keeps every gradient; want "
        "the loop over its lots, or lots.close() to end it"
    )


def _undoing(reduction: Reduction | None, piece: Piece) -> float:
    return 1.0 if reduction is None else reduction.scale(piece.size)


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def _one_row(leaf: Any) -> Any:
    return leaf.new_zeros(1, *leaf.shape[1:]) if _has_rows(leaf, 0) else leaf
