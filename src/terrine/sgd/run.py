"""A run of private steps: what happens in each, and between two of them.

next(steps)   draw a lot, add up its examples' clipped gradients, count the step on disk, add noise, set `.grad`
the loop      does with `.grad` what it likes
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine.common import generators
from terrine.common.keys import Key, Purpose
from terrine.errors import OutOfOrder
from terrine.sgd import distributed, sharding
from terrine.sgd.checkpoint import KeptRun
from terrine.sgd.clipping import Clipped, ClippingRule
from terrine.sgd.clipping.batch import flatten_batch
from terrine.sgd.clipping.functions import trained
from terrine.sgd.dataset import Asked, LotPart, RowReader, cut_lot
from terrine.sgd.devices import move_batch
from terrine.sgd.plan import Plan
from terrine.sgd.release import StepRelease, join_norms
from terrine.sgd.setup import check_mode, check_parameters

log = logging.getLogger("terrine.sgd")

_READ = 64 << 20  # bytes of rows that are read at a time


@dataclass(frozen=True)
class PrivateStep:
    """One released step: all of it is paid for, but how long it took."""

    number: int
    """How many steps were released, this one included."""
    plan: Plan
    seconds: float
    metrics: Mapping[str, float]
    """Noisy means over the lot of what the plan measures."""
    gradients: tuple[Tensor, ...]
    """The noisy gradients, as they are in the parameters: where the model is sharded, this process' parts."""
    norm: Tensor | None = None

    @property
    def epsilon(self) -> float:
        """The certified epsilon of the steps so far, from above; infinite without noise.

        It holds for a run that was to stop here. Who stops by what was released has spent the whole plan.
        """
        return epsilon_so_far(self.plan, self.number)

    @cached_property
    def gradient_norm(self) -> float:
        """The norm of the noisy gradient."""
        return float(join_norms(self.gradients) if self.norm is None else self.norm)

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "backward", "zero_grad"):
            raise AttributeError(f"PrivateStep.{name}: want optimizer.step() alone; the noisy gradient is in .grad")
        raise AttributeError(f"PrivateStep has no {name}; it has number, epsilon, metrics, gradient_norm, seconds")


class ClipsExamples(Protocol):
    """What adds up the clipped gradients of a batch: a `Clipper`, or a program that knows its model better."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    losses: Tensor
    is_run: bool

    def try_out(self, batch: Any) -> None:
        """Find out on made-up rows what can be found out before the charge."""

    def add_up(self, batch: Any, rule: ClippingRule, rows: Sequence[int] | None = None) -> Clipped:
        """Return the clipped sum of a batch; keep its units' losses."""

    def try_metric(self, name: str, metric: Any, batch: Any, /) -> None:
        """Measure a metric on made-up rows, before the charge."""

    def measure(self, metric: Any, batch: Any, /) -> Tensor:
        """Return a metric's value for every example."""


class Observer(Protocol):
    """What an audit does in a run of its owner's: it may join a lot and sees what becomes of it."""

    def join(self, release: StepRelease) -> None:
        """A lot's clipped sum is complete; noise has not been added."""

    def watch(self, release: StepRelease) -> None:
        """The noisy gradient is in the parameters."""


class PrivateSteps:
    """The steps of one run, each once: looping again goes on after the last that was released."""

    def __init__(
        self,
        clipper: ClipsExamples,
        reader: RowReader,
        optimizer: Optimizer,
        plan: Plan,
        *,
        first: Any,
        limit: int,
        device: torch.device | None,
        taken: int,
        secret: bytes | None,
        kept: KeptRun | None,
        is_kept: bool,
    ) -> None:
        self.plan, self.optimizer, self._clipper = plan, optimizer, clipper
        self.observer: Observer | None = None
        self._reader, self._device, self._kept = reader, device, kept
        self._is_sharded, self._is_kept = sharding.is_sharded(clipper.model), is_kept
        key = distributed.agreed(Key.fresh() if plan.seed is None else Key.seeded(plan.seed))
        self._lots = key  # a run that goes on keeps its order of the examples, where it has one
        if plan.seed is None and getattr(plan.sampling, "remembers", True) and secret is not None:
            self._lots = Key(secret)
        parameters = trained(clipper.model) if self._is_sharded else clipper.parameters
        self.release = StepRelease(parameters, plan, key, limit=limit, taken=taken)
        self._turn = threading.Lock()
        self._size = _rows_at_once(first, reader.people is not None, plan)
        self._closed = self._pending = self._is_over = False
        self._ahead: deque[tuple[LotPart, int]] = deque()  # workers read further parts while one is in use
        self._batches: Iterator[Any] | None = None
        self._stepped = self._released = 0
        self._versions: list[int | None] = []  # of the gradients as they were released
        self._is_whole = True  # whether the model has seen what was released
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __len__(self) -> int:
        return self.release.limit

    def __iter__(self) -> PrivateSteps:
        return self

    def __next__(self) -> PrivateStep:
        if not self._turn.acquire(blocking=False):
            raise OutOfOrder("steps: a step is under way, in another thread or in the loss; want one at a time")
        try:
            return self._take_step()
        finally:
            self._turn.release()

    def _take_step(self) -> PrivateStep:
        if self._closed:
            raise OutOfOrder("steps: the run was closed; want private_steps(...) again")
        if self.release.taken >= self.release.limit:
            with distributed.together():
                self._end_step()
            with distributed.together():
                self._finish()
            raise StopIteration
        begun = time.perf_counter()
        has_drawn = False
        try:
            if self._is_sharded:  # processes gather together: none may have failed before that
                with distributed.together():
                    self._begin_step()
            with distributed.together(step=self.release.taken, number_of_optimizer_steps=self._stepped):
                if not self._is_sharded:
                    self._begin_step()
                has_drawn = True
                with generators.untouched(), sharding.gather(self._clipper.model):
                    self._add_up()
                self._is_whole = False
                if self._kept is not None:
                    self._kept.count.advance(self.release.taken + 1)
            if self.observer is not None:
                self.observer.join(self.release)
            metrics = self.release.release(self.optimizer)
            if self.observer is not None:
                self.observer.watch(self.release)
        except BaseException:
            if has_drawn and self._is_sharded:
                self._abandon()  # nobody knows whether the others would save it with this process
            elif has_drawn:
                self._save_and_leave()
            raise
        self._pending = True
        self._released += 1
        seconds, norm = time.perf_counter() - begun, self.release.norm
        gradients = tuple(one.grad for one in self.release.parameters.values() if one.grad is not None)
        self._versions = [_version_of(one.grad) for one in self.release.parameters.values()]
        return PrivateStep(self.release.taken, self.plan, seconds, metrics, gradients, norm)

    @property
    def number(self) -> int:
        """How many steps were released."""
        return self.release.taken

    @property
    def epsilon(self) -> float:
        """The certified epsilon of the steps so far: see `PrivateStep.epsilon`."""
        return self.plan.epsilon_after(self.release.taken)

    @property
    def is_over(self) -> bool:
        """Whether a loop has come to the end of the steps."""
        return self._is_over

    def keep(self, **others: Any) -> None:
        """Have the checkpoint hold more, such as a learning-rate schedule; restores them where it goes on.

        Raises:
            OutOfOrder: there is no checkpoint.
            InvalidArgument: one has no state, or another than was saved.
        """
        if not self._is_kept:
            raise OutOfOrder("steps.keep: there is no checkpoint; want private_steps(..., checkpoint=path)")
        kept = self._kept
        saved = distributed.run_on_first(lambda: None if kept is None else kept.keep(others))
        for name, state in (saved or {}).items():
            if kept is None and name in others:
                others[name].load_state_dict(state)

    def save(self) -> None:
        """Save the model as it is, where there is a checkpoint; a sharded model by all processes at once."""
        if not self._is_kept or not (self._is_sharded or self._kept is not None):
            return
        states = self._clipper.model.state_dict(), self.optimizer.state_dict()
        if self._is_sharded:
            states = sharding.join_parts(states, keep=self._kept is not None)
        if self._kept is not None:
            self._kept.save(self.release.taken, self.release.bound, *states)

    def close(self) -> None:
        """End the run before its last step; a checkpoint is saved, and may be gone on from.

        Of a sharded model it is saved by all processes at once.

        Raises: OutOfOrder where a step is under way, or the checkpoint cannot be written; it is closed then, too.
        """
        if not self._turn.acquire(blocking=False):
            raise OutOfOrder(
                "steps.close(): a step is under way, in another thread or in the loss; want it between two"
            )
        try:
            self._save_and_leave()
        finally:
            self._turn.release()

    def _save_and_leave(self) -> None:
        try:
            is_saved = self._kept is None or self._kept.is_saved(self.release.taken)
            if self._is_sharded and self._is_kept and not self._closed:
                is_saved = distributed.from_first(is_saved)
            if self._is_whole and not (self._closed or is_saved):
                self.save()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        self._closed, self._pending = True, False
        self._leave()

    def _begin_step(self) -> None:
        self._end_step()
        check_mode(self._clipper.model)
        check_parameters(self._clipper.model, self.release.parameters)

    def _end_step(self) -> None:
        """The loop is through with the step before."""
        if not self._pending:
            return
        self._pending, self._is_whole = False, True
        if self._stepped == 0 and self._released == 1:
            log.warning("the optimizer that was given to private_steps was not stepped in the first turn")
        if self._is_kept and self._is_due():
            self.save()

    def _is_due(self) -> bool:
        """Whether to save now: of a sharded model every process says the same."""
        is_due = self._kept is not None and self._kept.is_due(self.release.taken)
        return bool(distributed.from_first(is_due)) if self._is_sharded else is_due

    def _finish(self) -> None:
        if not self._is_over:
            self.save()
        self._is_over = True
        self._leave()

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._kept is not None:
            self._kept.count.close()

    # -- a lot -----------------------------------------------------------------------------------------

    def _add_up(self) -> None:
        """Add up the clipped gradients of this step's lot, part by part."""
        if self._batches is None:
            self._batches = self._reader.seeded(self._ask())
        is_last = False
        while not is_last:
            batch, kept = next(self._batches)
            part, place = self._ahead.popleft()
            part = part.keep(kept)
            is_last = part.is_last
            generators.seed(self._seed(Purpose.TRAINING, self.release.taken, place))
            self._add_part(move_batch(batch, self._device), part)

    def _add_part(self, batch: Any, part: LotPart) -> None:
        if not len(part.rows):
            return
        clipped = self._clipper.add_up(batch, self.release.rule, part.people)
        measured = None if not self.plan.metrics else self._measure(batch, part)
        self.release.add(clipped, None if part.people is None else len(part.people), measured)

    def _measure(self, batch: Any, part: LotPart) -> Tensor:
        """The clamped sums of the plan's metrics, of each person's mean where people are drawn."""
        sums = []
        for metric in self.plan.metrics:
            if metric.function is None:
                values = self._clipper.losses
            else:
                values = self._clipper.measure(metric.function, batch)
                if part.people is not None:
                    values = torch.stack([rows.mean() for rows in values.split(list(part.people))])
            sums.append(metric.clamped_sum(values))
        return torch.tensor(sums, dtype=torch.float64)

    def _ask(self) -> Iterator[Asked]:
        """The rows of every part of every lot from here on, in order."""
        for step in range(self.release.taken, self.release.limit):
            drawn = self.plan.sampling.draw(self._lots, step, examples=self.plan.population, lot=self.plan.lot)
            for place, (units, is_last) in enumerate(cut_lot(drawn, self._size, distributed.share())):
                part = self._reader.part(units, is_last, self.plan, self.release.key, step)
                self._ahead.append((part, place))
                yield part.rows, self._seed(Purpose.READING, step, place)

    def _seed(self, purpose: Purpose, step: int, place: int) -> bytes:
        """What the global generators begin a part with, before it is read and before the loss runs on it."""
        rank, world = distributed.share()
        return self.release.key.draw(purpose, step).seed(place * world + rank)

    # -- the loop's optimizer --------------------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        if self._pending and self._is_gradient_gone():
            raise OutOfOrder(
                "optimizer.step(): the noisy gradient is gone, as by optimizer.zero_grad() after the step was "
                "released; want optimizer.step() alone"
            )

    def _is_gradient_gone(self) -> bool:
        gradients = [parameter.grad for parameter in self.release.parameters.values()]
        if all(gradient is None for gradient in gradients):
            return True
        versions = [_version_of(gradient) for gradient in gradients]
        untouched = any(now == then for now, then in zip(versions, self._versions, strict=True))
        return not untouched and not any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def _after_step(self, *_: Any) -> None:
        self._stepped += 1
        self._is_whole = True


def _version_of(gradient: Tensor | None) -> int | None:
    """How often a gradient was written to; nothing tells in inference mode."""
    return None if gradient is None or gradient.is_inference() else gradient._version


def epsilon_so_far(plan: Plan, number: int) -> float:
    """Return epsilon after so many steps, from above: computed at about fifty milestones, each good until the next."""
    stride = max(1, plan.steps // 50)
    return plan.epsilon_after(min(-(-number // stride) * stride, plan.steps))


def _rows_at_once(first: Any, of_people: bool, plan: Plan) -> int:
    """How many units are read at a time."""
    leaves = [leaf for leaf in flatten_batch(first)[0] if isinstance(leaf, Tensor)]
    size = sum(leaf[:1].numel() * leaf.element_size() for leaf in leaves)
    return max(1, int(_READ / max(size, 1)) // (plan.rows_per_person or 1 if of_people else 1))


__all__ = ["ClipsExamples", "Observer", "PrivateStep", "PrivateSteps", "epsilon_so_far"]
