"""An ordinary training loop, made private: the lots come from the plan, and the step clips, adds up and adds noise.

    model, optimizer, lots = make_private(model, optimizer, dataset, plan)
    for x, y in lots:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

The model and the optimizer are the caller's own objects: hooks on the model record what per-example clipping needs,
and a hook before `optimizer.step` puts the private gradient into the parameters. Whatever the optimizer then does
with it is post-processing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from terrine import check
from terrine.common import generators
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Composed, Event, Reproducible
from terrine.receipts import Charged
from terrine.sgd import devices, distributed, fingerprint
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.layers import validate
from terrine.sgd.lots import Asked, Collate, Piece, RowReader, cut, cut_to_fit
from terrine.sgd.plan import Plan
from terrine.sgd.run import PrivateRun
from terrine.sgd.sampling import Indices
from terrine.sgd.step import Step


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    account: Charged | None = None,
    *,
    person: Any = None,
    criterion: Callable[[Any, Any], Tensor] | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    piece: int | None = None,
    memory: float | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    device: str | torch.device | None = None,
    purpose: str = "DP-SGD",
    by: str = "terrine.sgd",
) -> tuple[nn.Module, Optimizer, Lots]:
    """The same model and optimizer, and the plan's lots, which move to the model's device; `device` moves the model.

    Where the plan draws people, `person` has an id for every row of the data set, equal for rows of one person.
    `piece` bounds how many of them, or of examples, one turn of the loop sees, `memory` about how many bytes their
    activations and gradients take, measured on the first few of every lot; the optimizer moves after a lot's last
    piece.
    `criterion` is only needed where the loss cannot be followed from the model's output. With a checkpoint, a run
    that was interrupted goes on from it, with the noise it would have had.

    Guarantee: what the optimizer learns from the data costs at most `plan.event`, which the account is charged for
    before the first step; after the plan's last step there are no more lots, and no more steps.

    Raises:
        InvalidArgument: the data set, the model or the optimizer does not fit the plan or each other.
        BudgetExceeded: the account does not have the plan's cost left; nothing was trained.
    """
    return start(
        model,
        optimizer,
        dataset,
        plan,
        account,
        watch=True,
        person=person,
        criterion=criterion,
        collate=collate,
        workers=workers,
        piece=piece,
        memory=memory,
        checkpoint=checkpoint,
        device=device,
        purpose=purpose,
        by=by,
    )


def start(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    account: Charged | None,
    *,
    watch: bool,
    person: Any = None,
    limit: int | None = None,
    looks: Event | None = None,
    criterion: Callable[[Any, Any], Tensor] | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    piece: int | None = None,
    memory: float | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    bound: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    purpose: str = "DP-SGD",
    by: str = "terrine.sgd",
) -> tuple[nn.Module, Optimizer, Lots]:
    """`make_private`, with or without watching the model: a trainer computes clipped sums itself.

    `looks` is what the run does to private data beside the plan, such as a paid-for validation; it is charged with it.
    `bound` is what else decides gradients: a checkpoint is gone on with only where all of it is the same.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model: want a torch.nn.Module, got {type(model).__name__}; the model comes first")
    bare = unwrapped(model)
    validate(bare)
    home = devices.settled(bare, device)
    _check_optimizer(bare, optimizer)
    piece = None if piece is None else check.whole("piece", piece)
    workers = check.whole("workers", workers, at_least=0)
    memory = _memory(memory, piece, workers) if watch else memory
    if criterion is not None and not callable(criterion):
        raise check.refuse("criterion", criterion, "a function of the output and the target")
    source = RowReader(dataset, plan, person, collate=collate, workers=workers)
    kept = _kept(checkpoint)
    saved = None
    if kept is not None:
        others = {"loss": criterion, "collate": collate} | dict(bound or {})
        if home is not None and home.type != "cpu":  # whose noise is another's
            others["device"] = home.type
        prints = {name: fingerprint.of_value(one) for name, one in others.items() if one is not None}
        prints |= {"model": fingerprint.of_model(bare)} | fingerprint.of_optimizer(optimizer, bare)
        saved = kept.open(plan, source, prints, piece=piece, memory=memory)
    old = None if saved is None else saved.key
    key = distributed.agreed(old or (Key.fresh() if plan.seed is None else Key.seeded(plan.seed)))
    step = Step(bare, plan, key, limit)
    if kept is not None and saved is not None:
        if saved.record["limit"] != step.limit:
            begun = f"the run in {kept.path} was begun, and charged, for {saved.record['limit']} steps"
            raise InvalidArgument(f"limit={step.limit}: {begun}")
        if saved.record.get("looks", repr(None)) != repr(looks):
            raise InvalidArgument(f"validation: the run in {kept.path} was begun, and charged, with another")
    receipt = None if saved is None else saved.record["charged_to"]
    if account is not None and distributed.is_first() and not _is_charged(account, receipt):
        event = plan.event_after(step.limit)
        if looks is not None:
            event = Composed([event, looks if plan.seed is None else Reproducible(looks)])
        receipt = _receipt(account, account.charge(event, purpose=purpose, by=by))
    for part in bare.modules():
        if (other := _RUNS.get(id(part))) is not None:
            other.close("another private run has begun on its model")
    run = _RUNS[id(bare)] = PrivateRun(step, optimizer, watch=watch, criterion=criterion, device=home)
    optimizer._terrine_run = run  # type: ignore[attr-defined]
    lots = Lots(source, run, piece, memory)
    if kept is not None:
        kept.attach(run, source, saved, charged_to=receipt, looks=looks)
        run.checkpoint = kept
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False  # the clipped sums are added up here, after clipping
    return model, optimizer, lots


class Lots:
    """The plan's lots, each once; iterating again goes on after the last lot that was handed out."""

    def __init__(self, source: RowReader, run: PrivateRun, piece: int | None, memory: float | None = None) -> None:
        self._source, self.run, self._piece, self._memory = source, run, piece, memory

    def __len__(self) -> int:
        return self.run.step.limit

    @property
    def epsilon(self) -> float:
        """The certified epsilon of the steps taken so far, which holds where their number was fixed beforehand.

        The account was charged for the whole plan. Who stops by what was released has spent the whole plan.
        """
        return self.run.step.plan.epsilon_after(self.run.step.taken)

    def close(self) -> None:
        """End the run before its last step, and leave the model as it is: further lots and steps are refused."""
        self.run.close("the run was closed")

    def keep(self, **others: Any) -> None:
        """Have the checkpoint hold more, such as a learning-rate schedule; restores them where it resumes."""
        if self.run.checkpoint is None:
            raise OutOfOrder("lots.keep: there is no checkpoint; want make_private(..., checkpoint=path)")
        self.run.checkpoint.keep(others)

    def __iter__(self) -> Iterator[Any]:
        run, plan = self.run, self.run.step.plan
        if run.finished:
            raise OutOfOrder(
                f"lots: all {run.step.limit} steps of the plan were taken in a loop over them; want one loop, whose "
                "lots are those of all epochs"
            )
        lent = generators.Lent()
        try:
            yield from self._lots(run, plan, lent)
        finally:
            lent.give_back()

    def _lots(self, run: PrivateRun, plan: Plan, lent: generators.Lent) -> Iterator[Any]:
        loop = run.enter(lent)
        ahead: deque[tuple[Piece, bool, bytes]] = deque()  # workers read further lots while one is in use

        def asked() -> Iterator[Asked]:
            for step in range(run.step.taken, run.step.limit):
                drawn = plan.sampling.draw(run.step.key, step, examples=plan.population, lot=plan.lot)
                for place, (units, last) in enumerate(self._cut(drawn)):
                    part, piece = self._source.piece(units, last, plan, run.step.key, step)
                    ahead.append((piece, place == 0, self._seed(Purpose.TRAINING, step, place)))
                    yield part, self._seed(Purpose.READING, step, place)

        batches = self._source.seeded(asked())
        while True:
            lent.take()
            if (batch := next(batches, None)) is None:
                break
            piece, first, seed = ahead.popleft()
            generators.seed(seed)
            yield run.begin(batch, piece, first=first)
            run.check(loop)
            run.finish()
        run.done()

    def _seed(self, purpose: Purpose, step: int, place: int) -> bytes:
        """What the global generators begin a piece with, before it is read and before it is trained on."""
        rank, world = distributed.share()
        return self.run.step.key.draw(purpose, step).seed(place * world + rank)

    def _cut(self, drawn: Indices) -> Iterable[tuple[Indices, bool]]:
        memory, run = self._memory, self.run
        if memory is None or not run.watch:
            return cut(drawn, self._piece, distributed.share())
        most = run.step.plan.rows_per_person or 1
        return cut_to_fit(drawn, distributed.share(), lambda: max(1, run.fitting(memory) // most))


_RUNS: weakref.WeakValueDictionary[int, PrivateRun] = weakref.WeakValueDictionary()  # by the id of their models


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, without what distributes it.

    Raises:
        InvalidArgument: it was compiled, which hides the layers that clipping needs to see.
    """
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        model = model.module
    if type(model).__name__ == "OptimizedModule" or any(
        type(module).__name__ == "OptimizedModule" for module in model.modules()
    ):
        raise InvalidArgument("the model is compiled: want the module that was given to torch.compile")
    return model


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument("LBFGS looks at a lot several times a step; want a first-order optimizer such as SGD")
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise InvalidArgument(
            f"the optimizer is a {type(optimizer).__name__} around another: want make_private with the one inside, "
            "before accelerator.prepare, or terrine.integrations.accelerate.prepare"
        )
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    named = dict(model.named_parameters())
    own = {id(one) for one in named.values()}
    if strange := len(held - own):
        raise InvalidArgument(f"the optimizer holds {strange} parameters that the model does not: want the model's own")
    idle = [name for name, one in named.items() if one.requires_grad and id(one) not in held]
    if idle:
        raise InvalidArgument(
            f"the optimizer lacks {', '.join(idle[:5])}{' ...' if len(idle) > 5 else ''}: want every trained one; "
            "freeze the others with requires_grad_(False)"
        )
    if not any(one.requires_grad for one in named.values()):
        raise InvalidArgument("the model has no parameter that requires a gradient: there is nothing to train")
    if hasattr(optimizer, "_terrine_run"):
        raise InvalidArgument("the optimizer belongs to another private run: want a fresh optimizer")


def _memory(memory: float | None, piece: int | None, workers: int) -> float | None:
    if memory is None:
        return None
    if piece is not None or workers:
        raise InvalidArgument(f"memory={memory} with piece={piece}, workers={workers}: want memory= alone, or piece=")
    return check.positive("memory", memory)


def _kept(checkpoint: Checkpoint | str | Path | None) -> Checkpoint | None:
    """Where the run is kept.

    Raises:
        InvalidArgument: it is no place.
    """
    kept = Checkpoint(Path(checkpoint)) if isinstance(checkpoint, str | Path) else checkpoint
    if not isinstance(kept, Checkpoint | None):
        raise check.refuse("checkpoint", kept, "a path or a Checkpoint")
    return kept


def _receipt(account: Charged, charge: Any) -> str:
    """What shows later that this account was charged: the charge's own hash, or the account's name."""
    return str(getattr(charge, "hash", None) or getattr(account, "name", type(account).__name__))


def _is_charged(account: Charged, receipt: str | None) -> bool:
    if receipt is None:
        return False
    if callable(history := getattr(account, "history", None)):
        return any(getattr(charge, "hash", None) == receipt for charge in history())
    return receipt == _receipt(account, None)
