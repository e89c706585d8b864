"""The steps of a private run: a loop that never holds a row.

    steps = private_steps(model, optimizer, dataset, plan, loss=loss)
    for step in steps:                 # the noisy gradient is in .grad
        optimizer.step()

Every turn draws a lot, runs the loss on each of its examples alone, clips, adds up, adds noise, and puts the result
into the parameters' gradients: empty lots and examples that are not finite are released with noise as any other.
Whatever the loop does with the gradient is post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from terrine import check
from terrine.events import Event
from terrine.receipts import Charged
from terrine.sgd import distributed, sharding
from terrine.sgd.checkpoint import Checkpoint, KeptRun, charge_run, describe_plan, load_run, open_run
from terrine.sgd.clipping import Clipper
from terrine.sgd.clipping.sums import refuse_strange
from terrine.sgd.dataset import Collate, RowReader, digest_model
from terrine.sgd.devices import find_device, move_batch
from terrine.sgd.layers import validate
from terrine.sgd.loss import Loss
from terrine.sgd.plan import Plan
from terrine.sgd.run import ClipsExamples, PrivateSteps
from terrine.sgd.setup import check_mode, check_optimizer, unwrap


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
            programs = {"model": bare, "loss": loss} if roots is None else dict(roots)
            programs |= {f"metric {metric.name!r}": metric.function for metric in plan.metrics}
            clipper = Clipper(
                bare, loss, microbatch=microbatch, memory=memory, precision=precision, reads_values=reads_values,
                roots=programs,
            )  # fmt: skip
        refuse_strange(plan.clip_at(0, plan.first_bound), clipper.parameters)
        first = move_batch(reader.first(), home)
        clipper.is_run = True
        clipper.try_out(first)
        for metric in plan.metrics:
            if metric.function is not None:
                clipper.try_metric(metric.name, metric.function, first)
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


__all__ = ["private_steps", "start"]
