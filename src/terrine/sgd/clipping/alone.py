"""Every example alone: a program run once for a microbatch in which no example can see another.

`torch.vmap` runs the program once for all examples, but as a program on a batch of one: batch statistics, differences
between examples, an index into the batch have nothing to act on but the example itself, in this batch and in any other.
What vmap cannot run is run one example after the other, by plain autograd:

    vmap        functions that vmap knows, questions of Python's by groups that agree
    lifted      the same for programs that write into tensors they make
    shielded    the same for models with gradient checkpointing
    one by one  anything

A microbatch costs a fixed amount, the recording and one pass over the sums, so larger is better until its activations,
and the per-example gradients that some layers keep, take more memory than the plain step would.
"""

from __future__ import annotations

import logging
import math
import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terrine.common import generators
from terrine.errors import InvalidArgument, TerrineError
from terrine.sgd.clipping.recording import Divided, Escaped, Recording
from terrine.sgd.clipping.state import caller
from terrine.sgd.clipping.use import Unfollowed

log = logging.getLogger("terrine.sgd")

FIRST = 4  # examples that are tried
LEAST, MOST = 64 << 20, 320 << 20  # bytes of one microbatch
KEPT = 48 << 20  # bytes of one whose kept gradients are many
SHARE = 0.85  # of what the plain step would keep
SLACK = 1.1  # a lot that is only a little larger than one microbatch is not cut

Cost = tuple[float, float]
"""Bytes of one example's activations, and of its gradients that are kept."""

_CHECKPOINTED = "terrine: saved tensors are recomputed"
_SHARED = "doesn't match the broadcast shape"  # of a tensor that is written to, and that all examples share
_VMAPS = ("vmap", "functorch", "batching rule", "batchedtensor", "is not implemented for", _CHECKPOINTED, _SHARED)
_PATIENCE = 8  # examples in a row that vmap cannot run even alone, before all go one by one


@dataclass
class Way:
    """How the examples of one model are run: found out on made-up rows, so that no example decides it for others."""

    lifted: bool = False
    shielded: bool = False
    one_by_one: bool = False
    writes_rows: bool = False  # whether the program writes into its example
    refused: int = 0  # examples in a row that vmap could not run even alone
    reason: str = ""  # what vmap could not run
    sums: dict[Any, int] = field(default_factory=dict)  # calls of `clipped_sum` by what the loss is made of
    costs: dict[Any, Cost] = field(default_factory=dict)  # of one example, by the shapes of its inputs

    def change(self, failure: Exception, *, is_trial: bool, is_single: bool) -> bool:
        """Choose another way after a failure under vmap; whether there is one.

        On made-up rows, one by one is the last; later it takes several examples in a row that fail by themselves.

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
        if known and (is_trial or is_single):
            self.refused += 1
            self.one_by_one = is_trial or self.refused >= _PATIENCE
        if self.one_by_one:
            followed = reason.partition(":")[0] if isinstance(failure, Unfollowed) else "the operation"
            operation = re.search(r"aten::\w+", reason)
            self.reason = f"{operation.group() if operation else followed} at {caller(failure)}"
            if not is_trial:
                self.warn("")
        return False

    def warn(self, slowdown: str) -> None:
        """Say that examples go one by one, and why."""
        log.warning("one example at a time, exact but slow%s: vmap cannot run %s", slowdown, self.reason)


def way_of(model: nn.Module) -> Way:
    """Return how this model is run, as far as is known."""
    return _WAYS.setdefault(model, Way())


_WAYS: weakref.WeakKeyDictionary[nn.Module, Way] = weakref.WeakKeyDictionary()


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether the machine, not an example, is why something failed."""
    return isinstance(failure, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(failure)


def run_together(function: Callable[..., Tensor], rows: Sequence[Tensor], recording: Recording) -> Tensor:
    """Return `function` of every example's rows, (n, ...), under vmap; `recording.put_back()` has to follow.

    Raises:
        InvalidArgument: the program reads or keeps something of an example.
        Divided: examples gave different answers to Python; those that agree can be run together.
    """

    def run_one(marker: Tensor, *row: Tensor) -> Tensor:
        recording.begin(marker, row)
        with recording:
            value = recording.as_own(function(*row))
        if recording.escaped is not None:  # and was caught by a bare except
            raise recording.escaped
        return value

    marker = torch.zeros(recording.examples, device=rows[0].device)
    hooks = nullcontext() if recording.shielded else torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED)
    try:
        with hooks, _same_coins():
            return torch.vmap(run_one, randomness="different")(marker, *rows)
    except Escaped as escaped:
        raise escaped.failure from None


def run_alone(function: Callable[..., Any], row: Sequence[Tensor], watch: Recording) -> Any:
    """Return `function` of one example's row, without vmap; `watch.put_back()` has to follow."""
    watch.begin(None, row)
    with watch, _same_coins():
        return function(*row)


@contextmanager
def _same_coins() -> Iterator[None]:
    """Refuse a program that seeds torch's generator, or draws from Python's or numpy's.

    Under vmap a number of Python's is one for all examples of a microbatch, so what others draw would hang on who is
    there; and after a seed all draws are known.

    Raises: InvalidArgument
    """
    seed, pythons = torch.initial_seed(), random.getstate()
    numpys: Any = np.random.get_state()
    yield
    if torch.initial_seed() != seed:
        raise InvalidArgument(
            "the loss or the model seeds torch's generator (manual_seed, set_rng_state): what other examples draw "
            "would be known; want none, or Plan(seed=...) for tests"
        )
    now: Any = np.random.get_state()
    if random.getstate() != pythons or now[2] != numpys[2] or not np.array_equal(now[1], numpys[1]):
        raise InvalidArgument(
            "the loss or the model uses Python's random or numpy.random: one number would be drawn for several "
            "examples; want torch.rand and its likes, which draw for each"
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
    recording = Recording({}, count, reads_values=reads_values)
    with torch.no_grad():
        try:
            return run_together(function, [part.clone() for part in rows], recording)
        except TerrineError:
            raise
        except Exception:  # whatever vmap cannot do
            generators.restore(before, device)
        finally:
            recording.put_back()
        values = [_try_alone(function, [part[index].clone() for part in rows], reads_values) for index in range(count)]
    shape = next((value.shape for value in values if isinstance(value, Tensor)), torch.Size())
    return torch.stack([value if isinstance(value, Tensor) else torch.full(shape, torch.nan) for value in values])


def _try_alone(function: Callable[..., Tensor], row: Sequence[Tensor], reads_values: bool) -> Tensor | None:
    watch = Recording({}, 1, reads_values=reads_values)
    try:
        return torch.as_tensor(run_alone(function, row, watch))
    except TerrineError:
        raise
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        return None
    finally:
        watch.put_back()


def take_gradients(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return the gradients of what `run` returns, by plain autograd; empty where it depends on no parameter."""
    value = run()
    if not value.requires_grad:
        return []
    if not _has_reentry(value):
        return torch.autograd.grad(value, parameters, allow_unused=True)
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(value)
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _has_reentry(value: Tensor) -> bool:
    """Whether a part of the graph goes backward by itself: gradient checkpointing with reentry, which `grad` skips."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__.startswith("CheckpointFunction"):
            return True
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return False


def cut(size: int, cost: Cost, parameters: Mapping[str, nn.Parameter], memory: float = math.inf) -> list[int]:
    """The sizes of a lot's microbatches, each of which goes forward and backward before the next."""
    activations, gradients = cost
    least = LEAST if gradients <= 0.3 * activations else KEPT
    target = min(max(least, SHARE * activations * size), MOST) + 2 * _bytes(parameters)
    return _evenly(size, min(target, memory) / max(activations + gradients, 1.0))


def _evenly(size: int, most: float) -> list[int]:
    """`size` examples in parts of about at most `most`, about equally large."""
    if size <= SLACK * most:
        return [size]
    parts = math.ceil(size / max(most, 1.0))
    return [size * (place + 1) // parts - size * place // parts for place in range(parts)]


def _bytes(parameters: Mapping[str, nn.Parameter]) -> int:
    return sum([one.numel() * one.element_size() for one in parameters.values()])
