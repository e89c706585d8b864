"""One private run over an ordinary loop: what the model, the loss and the optimizer do with the lot that is out.

    lots            hands out a lot, as tensors that know what they hold of its examples     begin
    model(x)        runs every example alone, a microbatch at a time, and records            forward
    loss.backward() is allowed from a sum or mean over the examples                          HandedOut.backward
    optimizer.step  is given the noisy sum of the clipped gradients                          _before_step

A step without a lot, a second one, or one after the plan's last is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from terrine.common import generators
from terrine.common.keys import Purpose
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd import distributed
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping.alone import CHECKED_EVERY, check_company, each_alone
from terrine.sgd.clipping.examples import is_unwatched, tensors, unwatched
from terrine.sgd.devices import moved
from terrine.sgd.handed_out import HandedOut
from terrine.sgd.isolation import LotTensor, Rows, handed, plain
from terrine.sgd.lots import FIRST, Piece
from terrine.sgd.step import Step


class PrivateRun:
    """One private run: what it is to do with the lot that was handed out.

    `watch`: an ordinary loop computes the gradients; a trainer adds clipped sums to the step itself.
    """

    def __init__(
        self,
        step: Step,
        optimizer: Optimizer,
        *,
        watch: bool = True,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.step, self.optimizer, self.watch, self._device = step, optimizer, watch, device
        self.checkpoint: Checkpoint | None = None
        self._criterion = criterion
        self._loop: object = None
        self._closed: str | None = None  # why there are no further steps
        self._done = False
        self._lot: HandedOut | None = None  # that waits for its step
        self._last = False
        self._target: Any = None
        self._measured: tuple[float, float] | None = None
        self._leaked: set[str] = set()
        self._lent, self._draws = generators.Lent(), 0
        self._hooks: list[Any] = [optimizer.register_step_pre_hook(self._before_step)]
        optimizer.register_step_post_hook(self._after_step)
        if watch:
            step.model.forward = _Forward(self, step.model)
            for name, parameter in step.parameters.items():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._leak(name)))

    def enter(self, lent: generators.Lent) -> object:
        """A loop over the lots begins, and ends any other; a lot that was not stepped on is used up.

        `lent` are the global generators, which the loop has back after every step.

        Raises:
            OutOfOrder: the run was closed.
        """
        if self._closed is not None:
            raise OutOfOrder(f"lots: {self._closed}; want a run of its own, by make_private")
        self.step.skip()
        self._lot = None
        self._lent.give_back()
        self._lent, self._loop = lent, object()
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
        self._last = piece.last
        if first:
            self.step.begin()
            self._draws = 0
        self._lot = lot = HandedOut(self.step, piece)
        self.step.expect(None if piece.people is None else len(piece.people))
        self._leaked.clear()
        batch = moved(batch, self._device)
        if not self.watch or not piece.size:  # there is nothing to keep apart in an empty lot
            return batch
        batch = pytree.tree_map(lambda leaf: handed(leaf, lot, Rows(0)) if isinstance(leaf, Tensor) else leaf, batch)
        self._target = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        return batch

    @property
    def people(self) -> tuple[int, ...] | None:
        """How many rows each person of the piece that is out has; None where examples are drawn."""
        return None if self._lot is None else self._lot.people

    def fitting(self, memory: float) -> int:
        """How many examples about fit into so many bytes, as the last piece had it."""
        return FIRST if self._measured is None else max(1, int(memory / max(sum(self._measured), 1.0)))

    def finish(self) -> None:
        """A piece is over; where the loop took no step, or one that failed, the lot counts as used all the same."""
        if self._last:
            self.step.skip()
        self._lot = self._target = None
        self._lent.give_back()
        if self.checkpoint is not None:
            self.checkpoint.after_step(self)

    @property
    def finished(self) -> bool:
        """Whether a loop has come to the end of the lots."""
        return self._done

    def done(self) -> None:
        """There are no more lots."""
        self._leave()
        if self.checkpoint is not None and not self._done:
            self.checkpoint.after_run(self)
        self._done = True

    def close(self, why: str) -> None:
        """Leave the model, and take no further step."""
        self._leave()
        self._lot, self._loop, self._closed = None, None, why

    def __deepcopy__(self, _memo: Any) -> PrivateRun:
        """Itself: hooks are copied with a model, and do nothing for the copy."""
        return self

    def _leave(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks[1:]:
            hook.remove()
        del self._hooks[1:]
        forward = vars(self.step.model).get("forward")
        if isinstance(forward, _Forward) and forward.run is self:
            forward.remove()

    def _leak(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if not is_unwatched():
                self._leaked.add(name)

        return hook

    # -- the model -------------------------------------------------------------------------------------

    def forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's outputs for the lot that is out, every example alone; for anything else, the model itself."""
        if is_unwatched():
            return original(*args, **kwargs)
        lot = self._lot
        if not any(isinstance(leaf, LotTensor) for leaf in tensors((*args, kwargs))):
            return self._aside(original, args, kwargs)
        if lot is None or any(one.lot is not lot for one in tensors((*args, kwargs)) if isinstance(one, LotTensor)):
            raise OutOfOrder("the model is given tensors of a lot that is over; want those of the lot that is out")
        with self._secret_draws():
            outputs = lot.forward(original, args, kwargs)
        if self._criterion is not None and torch.is_grad_enabled():
            lot.loss = lambda: self._by_criterion(outputs)
        return outputs

    def _secret_draws(self) -> AbstractContextManager[None]:
        """Draws that nobody knows, also where the generators are not lent to this run, as in `next(iter(lots))`."""
        if self._lent.is_out:
            return nullcontext()
        self._draws += 1
        rank, world = distributed.share()
        draw = self.step.key.draw(Purpose.ASIDE, self.step.taken)
        return generators.seeded(draw.seed(self._draws * world + rank))

    def _aside(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward pass on something else than the lot."""
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if self._lot is not None and self._lot.size == 0:  # many models cannot take a lot without rows: one of zeros
            args, kwargs = pytree.tree_map(_one_row, (args, kwargs))
            return pytree.tree_map(_no_rows, original(*args, **kwargs))
        if self._lot is not None and self.step.model.training:
            raise InvalidArgument(
                "the model is given no tensor that comes from the lot, while one is out: no example's part in its "
                "gradient is known (numpy, torch.tensor and lists of texts are not followed); want the lot's own "
                "tensors, or torch.no_grad() to look at other data"
            )
        model = self.step.model
        if any(leaf.requires_grad for leaf in tensors((*args, kwargs))):  # for the input's own sake
            still = {name: parameter.detach() for name, parameter in self.step.parameters.items()}
            with unwatched():
                return functional_call(model, still, args, kwargs)
        output = original(*args, **kwargs)
        for leaf in tensors((output,)) if self.step.model.training or self._lot is not None else ():
            if leaf.requires_grad:
                leaf.register_hook(_refuse_aside)
        return output

    def _by_criterion(self, outputs: Any) -> Tensor:
        """The sum of the criterion's losses, each of one example alone."""
        criterion, target = self._criterion, self._target
        assert criterion is not None
        leaves, nesting = pytree.tree_flatten((outputs, target))

        def both(rows: Sequence[Tensor]) -> Tensor:
            given = iter(rows)
            lot = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return criterion(*pytree.tree_unflatten(lot, nesting))

        rows = [plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        modules = tuple(criterion.modules()) if isinstance(criterion, nn.Module) else ()
        if self.step.taken % CHECKED_EVERY == 0:
            alone = [row.detach() for row in rows]
            check_company(both, lambda *row: both([one.unsqueeze(0) for one in row]), alone, modules)
        with self._secret_draws():
            return each_alone(lambda *row: both(row).sum(), rows, modules).sum()

    # -- the optimizer ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise InvalidArgument("optimizer.step(closure): want step() without one; a closure would look again")
        over = self.step.taken >= self.step.limit
        if self._lot is None or over:
            done = f"all {self.step.limit} steps of the plan are taken"
            why = done if over else self._closed or "no lot has been handed out"
            raise OutOfOrder(f"optimizer.step(): {why}; want one step for each lot")
        self.step.check_parameters(optimizer)
        lot, self._lot = self._lot, None
        if self.watch and lot.size:
            if self._leaked:
                raise InvalidArgument(
                    f"{', '.join(sorted(self._leaked))}: used outside the model's forward pass, where no gradient can "
                    "be clipped; want every use of a trained parameter inside it (weight decay is the optimizer's)"
                )
            self.step.add(lot.clipped())
            self._measured = lot.measured
        if self._last:
            if self.checkpoint is not None:
                self.checkpoint.before_release(self)
            self.step.release(optimizer)
            if self.step.taken >= self.step.limit:
                self._leave()
        else:
            self.step.withhold()

    def _after_step(self, *_: Any) -> None:
        if self._last:
            self._lent.give_back()


class _Forward:
    """What stands for a model's `forward` while a private run is on it."""

    def __init__(self, run: PrivateRun, model: nn.Module) -> None:
        self.run, self._model, self._before = run, model, vars(model).get("forward")
        self._original = model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.forward(self._original, args, kwargs)

    def remove(self) -> None:
        """Put back what was there before."""
        if self._before is None:
            del self._model.__dict__["forward"]
        else:
            self._model.forward = self._before

    def __reduce__(self) -> Any:
        """In a copy of the model, its own forward method."""
        return _own_forward, (self._model,)


def _own_forward(model: nn.Module) -> Any:
    return type(model).forward.__get__(model)


def _refuse_aside(_: Tensor) -> None:
    raise OutOfOrder(
        "loss.backward(): no lot has been handed out, and the private run on this model keeps every gradient; want "
        "the loop over its lots, or lots.close() to end it"
    )


def _one_row(leaf: Any) -> Any:
    return leaf.new_zeros(1, *leaf.shape[1:]) if isinstance(leaf, Tensor) and leaf.dim() and not len(leaf) else leaf


def _no_rows(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else leaf
