"""Every example alone: a program run once for a microbatch in which no example can see another.

`torch.vmap` runs the program once for all examples, but as a program on a batch of one: batch statistics, differences
between examples, an index into the batch have nothing to act on but the example itself, in this batch and in any other.
What vmap cannot run is run one example after the other, by plain autograd:

    vmap        functions that vmap knows, questions of Python's by groups that agree
    lifted      the same for programs that write into tensors they make
    shielded    the same for models with gradient checkpointing
    one by one  anything
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.common import generators
from terrine.errors import InvalidArgument, TerrineError
from terrine.sgd.clipping.microbatches import Cost
from terrine.sgd.clipping.recording import Divided, Escaped, Recording
from terrine.sgd.clipping.use import Unfollowed

log = logging.getLogger("terrine.sgd")

_CHECKPOINTED = "terrine: saved tensors are recomputed"
_SHARED = "doesn't match the broadcast shape"  # of a tensor that is written to, and that all examples share
_VMAPS = ("vmap", "functorch", "batching rule", "batchedtensor", "is not implemented for", _CHECKPOINTED, _SHARED)
_PATIENCE = 3  # microbatches that may fail under vmap before examples go one by one for good


@dataclass
class Way:
    """How the examples of one model are run; what is found out on made-up rows, or by failures."""

    lifted: bool = False
    shielded: bool = False
    one_by_one: bool = False
    failures: int = 0
    sums: dict[Any, int] = field(default_factory=dict)  # by the program of a loss: how often it was clipped and summed
    costs: dict[Any, Cost] = field(default_factory=dict)  # of one example, by the shapes of its inputs

    def give_way(self, failure: Exception) -> bool:
        """Whether to try again under vmap, in another way; if not, the microbatch goes one by one.

        Raises: the failure, where it is one of ours, or the machine's.
        """
        reason = str(failure)
        if isinstance(failure, TerrineError | Divided) or "same device" in reason or is_out_of_memory(failure):
            raise failure
        known = isinstance(failure, Unfollowed | NotImplementedError) or any(one in reason.lower() for one in _VMAPS)
        if known and _CHECKPOINTED in reason and not self.shielded:
            self.shielded = True
            return True
        if known and not self.lifted:
            self.lifted = True
            return True
        self.failures += 1
        if known or self.failures >= _PATIENCE:
            self.one_by_one = True
            operation = re.search(r"aten::\w+", reason)
            followed = reason.partition(":")[0] if isinstance(failure, Unfollowed) else ""
            what = operation.group() if operation else followed
            log.warning("one example at a time, exact but slow%s", f": vmap cannot run {what}" if what else "")
        return False


def way_of(model: nn.Module) -> Way:
    """Return how this model is run, as far as is known."""
    return _WAYS.setdefault(model, Way())


_WAYS: weakref.WeakKeyDictionary[nn.Module, Way] = weakref.WeakKeyDictionary()


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether the machine, not an example, is why something failed."""
    return isinstance(failure, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(failure)


def run_together(function: Callable[..., Tensor], rows: Sequence[Tensor], recording: Recording) -> Tensor:
    """Return `function` of every example's rows, (n, ...), under vmap.

    Raises:
        InvalidArgument: the program reads or keeps something of an example.
        Divided: examples gave different answers to Python; those that agree can be run together.
    """

    def run_one(marker: Tensor, *row: Tensor) -> Tensor:
        recording.begin(marker, row)
        try:
            with recording:
                value = recording.as_own(function(*row))
        finally:
            recording.put_back()
        if recording.escaped is not None:  # and was caught by a bare except
            raise recording.escaped
        return value

    marker = torch.zeros(recording.examples, device=rows[0].device)
    hooks = nullcontext() if recording.shielded else torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED)
    seed = torch.initial_seed()
    try:
        with hooks:
            values: Tensor = torch.vmap(run_one, randomness="different")(marker, *rows)
    except Escaped as escaped:
        raise escaped.failure from None
    check_seed(seed)
    return values


def run_alone(function: Callable[..., Any], row: Sequence[Tensor], *, reads_values: bool = False) -> Any:
    """Return `function` of one example's row, without vmap."""
    watch, seed = Recording({}, 1, reads_values=reads_values), torch.initial_seed()
    watch.begin(None, row)
    try:
        with watch:
            value = function(*row)
    finally:
        watch.put_back()
    check_seed(seed)
    return value


def check_seed(before: int) -> None:
    """Refuse a program that has seeded torch's generator: the draws of all examples behind it would be known.

    Raises: InvalidArgument
    """
    if torch.initial_seed() != before:
        raise InvalidArgument(
            "torch.manual_seed() inside the loss or the model: what other examples draw would be known; want none, or "
            "Plan(seed=...) for tests"
        )


def group_by_answer(answers: Sequence[Any], each: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Return the examples of units that can run together, group by group, and those of units that have to run alone.

    A unit is `each` examples that follow each other. Those whose examples all gave one answer run with others that
    gave the same, unless hardly two agree.
    """
    groups: dict[str, list[Tensor]] = {}
    alone: list[Tensor] = []
    for unit in torch.arange(len(answers)).split(each):
        distinct = {repr(answers[index]) for index in unit.tolist()}
        if len(distinct) == 1:
            groups.setdefault(distinct.pop(), []).append(unit)
        else:
            alone.append(unit)
    if 2 * len(groups) * each > len(answers):
        return [], list(torch.arange(len(answers)).split(each))
    return [torch.cat(units) for units in groups.values()], alone


def run_each(function: Callable[..., Tensor], rows: Sequence[Tensor], *, reads_values: bool = False) -> Tensor:
    """Return `function` of every example's rows, (n, ...), without gradients.

    One after the other where vmap cannot; an example for which it fails gives nan.
    """
    device, count = rows[0].device, len(rows[0])
    before = generators.states(device)
    with torch.no_grad():
        try:
            return run_together(function, rows, Recording({}, count, reads_values=reads_values))
        except TerrineError:
            raise
        except Exception:  # whatever vmap cannot do
            generators.restore(before, device)
        values = [_try_alone(function, [part[index] for part in rows], reads_values) for index in range(count)]
    shape = next((value.shape for value in values if isinstance(value, Tensor)), torch.Size())
    return torch.stack([value if isinstance(value, Tensor) else torch.full(shape, torch.nan) for value in values])


def _try_alone(function: Callable[..., Tensor], row: Sequence[Tensor], reads_values: bool) -> Tensor | None:
    try:
        return torch.as_tensor(run_alone(function, row, reads_values=reads_values))
    except TerrineError:
        raise
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        return None


def take_gradients(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return the gradients of what `run` returns, by plain autograd; empty where it depends on no parameter."""
    value = run()
    if not value.requires_grad:
        return []
    try:
        return torch.autograd.grad(value, parameters, allow_unused=True)
    except RuntimeError as failure:
        if "use_reentrant" not in str(failure):
            raise
    value = run()  # reentrant checkpointing: gradients can only be had from `grad`
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(value)
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def flatten_batch(batch: Any) -> tuple[list[Any], Any, int]:
    """Return the leaves of a batch, how they are nested, and how many examples it has.

    Raises: InvalidArgument where it holds something else than tensors with as many rows.
    """
    if hasattr(batch, "keys") and not isinstance(batch, dict):  # such as transformers' BatchEncoding
        batch = {name: batch[name] for name in batch.keys()}  # noqa: SIM118
    leaves, nesting = pytree.tree_flatten(batch)
    strange = sorted(
        {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | None)}
    )
    if strange:
        raise InvalidArgument(
            f"a batch with {', '.join(strange)}: every example would see those of all; want tensors, such as texts as "
            "token ids, or a collate function that makes them"
        )
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    if not shapes:
        raise InvalidArgument(f"a batch of type {type(batch).__name__} without tensors: want some, examples first")
    if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
        raise InvalidArgument(
            f"a batch of tensors of shapes {shapes}: want a first dimension that counts examples in each; what all "
            "examples share belongs into the model, as a buffer"
        )
    return leaves, nesting, shapes[0][0]
