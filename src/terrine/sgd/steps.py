"""The steps of a private run: a loop that never holds a row.

    steps = private_steps(model, optimizer, dataset, plan, loss=loss)
    for step in steps:                 # the noisy gradient is in .grad
        optimizer.step()

Every turn draws a lot, runs the loss on each of its examples alone, clips, adds up, adds noise, and puts the result
into the parameters' gradients: empty lots and examples that are not finite are released with noise as any other.
Whatever the loop does with the gradient is post-processing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine import check
from terrine.common import generators
from terrine.common.keys import Key, Purpose
from terrine.errors import OutOfOrder
from terrine.events import Event
from terrine.receipts import Charged
from terrine.sgd import distributed, sharding
from terrine.sgd.checkpoint import Checkpoint, KeptRun, charge_run, describe_plan, load_run, open_run
from terrine.sgd.clipping import Clipped, Clipper, ClippingRule
from terrine.sgd.clipping.alone import flatten_batch
from terrine.sgd.clipping.examples import trained
from terrine.sgd.clipping.policy import refuse_strange
from terrine.sgd.dataset import Asked, Collate, LotPart, RowReader, cut_lot, digest_model
from terrine.sgd.devices import find_device, move_batch
from terrine.sgd.layers import validate
from terrine.sgd.loss import Loss
from terrine.sgd.plan import Plan
from terrine.sgd.release import StepRelease, join_norms
from terrine.sgd.setup import check_mode, check_optimizer, check_parameters, unwrap

log = logging.getLogger("terrine.sgd")

_READ = 64 << 20  # bytes of rows that are read at a time


def private_steps(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    loss: Loss,
    account: Charged | None = None,
    person: Any = None,
    microbatch: int | None = None,
    memory: float | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    reads_values: bool = False,
    purpose: str = "DP-SGD",
    by: str = "terrine.sgd",
) -> PrivateSteps:
    """Return the steps of a private run, to loop over; each leaves its noisy gradient in the parameters' `.grad`.

    Args:
        model: The module to train, in training mode.
        optimizer: Of the model's trained parameters; the loop steps it.
        dataset: A map-style data set, or a tuple of tensors: the whole of it, in every process.
        plan: Decides lots, clipping, noise and how many steps there are.
        loss: A function of (model, batch), run for every example alone, as a batch of one; or a criterion, an
            `nn.Module` that stands for `criterion(model(x), y)`.
        account: Charged for the whole plan before the first step.
        person: An id for every row, equal for rows of one person, where the plan draws people.
        microbatch: How many rows are in memory at a time, instead of as many as are fastest.
        memory: About how many bytes activations and gradients may take.
        checkpoint: Where to keep the run; one that was interrupted goes on from there, after what it has released.
        device: Moves the model there; rows follow by themselves.
        precision: "bf16" runs the loss under autocast; norms, clipping and sums stay in single precision.
        collate: Makes a batch of a list of the data set's items.
        workers: Processes that read the data set.
        reads_values: The loss and the model may read an example's numbers into Python, and keep nothing of them.
        purpose: What the account notes as the reason.
        by: What the account notes as who asked.

    Raises:
        InvalidArgument: The data set, the model, the loss or the optimizer does not fit the plan or each other.
        BudgetExceeded: The account does not have the plan's cost left; nothing was trained.

    Guarantee:
        What the loop learns of the data by gradients and by `PrivateStep` costs at most `plan.event`, however it goes
        on with them. How long a step took tells how many examples were drawn.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = Plan(examples=100, lot=10, steps=3, clip=1.0, noise=1.0, delta=1e-5)
        >>> rows = torch.randn(100, 4), torch.zeros(100, dtype=torch.int64)
        >>> for step in private_steps(model, optimizer, rows, plan, loss=nn.CrossEntropyLoss()):
        ...     optimizer.step()
        >>> step.number
        3
    """
    return start(
        model, optimizer, dataset, plan, loss=loss, account=account, person=person, microbatch=microbatch,
        memory=memory, checkpoint=checkpoint, device=device, precision=precision, collate=collate, workers=workers,
        reads_values=reads_values, purpose=purpose, by=by,
    )  # fmt: skip


def start(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    loss: Loss | None = None,
    clipper: ClipsExamples | None = None,
    account: Charged | None = None,
    person: Any = None,
    limit: int | None = None,
    looks: Event | None = None,
    microbatch: int | None = None,
    memory: float | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    reads_values: bool = False,
    roots: Mapping[str, Any] | None = None,
    purpose: str = "DP-SGD",
    by: str = "terrine.sgd",
) -> PrivateSteps:
    """Return what `private_steps` does, for trainers: with at most `limit` steps, and a loss or a clipper.

    `looks` is what the run does to private data beside the plan, such as a paid-for validation; it is charged with it.
    `roots` are what the loss's state is reached from, instead of the loss itself.
    """
    bare, place = unwrap(model), Checkpoint.at(checkpoint)
    limit = plan.steps if limit is None else min(limit, plan.steps)
    with distributed.together():
        home = find_device(bare, device)
        optimizer = check_optimizer(bare, optimizer)
        check_mode(bare)
        workers = check.whole("workers", workers, at_least=0)
        reader = RowReader(dataset, plan, person, collate=collate, workers=workers)
    with distributed.together(), sharding.gather(bare):
        validate(bare)
        if clipper is None:
            assert loss is not None
            clipper = Clipper(
                bare, loss, microbatch=microbatch, memory=memory, precision=precision, reads_values=reads_values,
                roots=roots,
            )  # fmt: skip
        refuse_strange(plan.clip_at(0, plan.first_bound), clipper.parameters)
        first = move_batch(reader.first(), home)
        clipper.try_out(first)
        same: dict[str, Any] = {}
        if distributed.share()[1] > 1:
            same = {"plan": describe_plan(plan), "steps": limit, "looks": repr(looks), "precision": precision}
            same |= {"data_set": reader.digest(), "model": digest_model(bare), "checkpoint": place is not None}
    distributed.check_same(**same)
    kept: list[KeptRun] = []  # of the first process
    try:
        taken, bound, secret, state = distributed.run_on_first(lambda: open_run(place, plan, limit, looks, kept))
        if state is not None and place is not None:
            with distributed.together():
                load_run(place.path, bare, optimizer, state)
        distributed.run_on_first(lambda: charge_run(account, plan, limit, looks, kept, purpose, by))
        steps = PrivateSteps(
            clipper, reader, optimizer, plan, first=first, limit=limit, device=home, taken=taken, secret=secret,
            kept=kept[0] if kept else None, is_kept=place is not None,
        )  # fmt: skip
        if bound is not None:
            steps.release.bound = bound
        if state is None:
            steps.save()
    except BaseException:
        for run in kept:
            run.abandon()
        raise
    return steps


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

    def try_out(self, batch: Any) -> None:
        """Find out on made-up rows what can be found out before the charge."""

    def add_up(self, batch: Any, rule: ClippingRule, rows: Sequence[int] | None = None) -> Clipped:
        """Return the clipped sum of a batch; keep its units' losses."""

    def measure(self, metric: Any, batch: Any, /) -> Tensor:
        """Return a metric's value for every example."""

    def check_failures(self) -> None:
        """Raise where every example of the lot failed."""


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
            batch = next(self._batches)
            part, place = self._ahead.popleft()
            is_last = part.is_last
            generators.seed(self._seed(Purpose.TRAINING, self.release.taken, place))
            self._add_part(move_batch(batch, self._device), part)
        self._clipper.check_failures()

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
        if self._pending and all(one.grad is None for one in self.release.parameters.values()):
            raise OutOfOrder(
                "optimizer.step(): the noisy gradient is gone, as by optimizer.zero_grad() after the step was "
                "released; want optimizer.step() alone"
            )

    def _after_step(self, *_: Any) -> None:
        self._stepped += 1
        self._is_whole = True


def epsilon_so_far(plan: Plan, number: int) -> float:
    """Return epsilon after so many steps, from above: computed at about fifty milestones, each good until the next."""
    stride = max(1, plan.steps // 50)
    return plan.epsilon_after(min(-(-number // stride) * stride, plan.steps))


def _rows_at_once(first: Any, of_people: bool, plan: Plan) -> int:
    """How many units are read at a time."""
    leaves = [leaf for leaf in flatten_batch(first)[0] if isinstance(leaf, Tensor)]
    size = sum(leaf[:1].numel() * leaf.element_size() for leaf in leaves)
    return max(1, int(_READ / max(size, 1)) // (plan.rows_per_person or 1 if of_people else 1))


__all__ = ["Observer", "PrivateStep", "PrivateSteps", "private_steps", "start"]
