"""Every example alone: the forward pass of a microbatch in which no example can see another.

`torch.vmap` runs the model once for all examples, but as a program on a lot of one: batch statistics, differences
between examples, an index into the lot have nothing to act on but the example itself, in this lot and in any other.
What vmap cannot run is run one example after the other, by plain autograd:

    vmap        functions that vmap knows, numbers read into Python by groups that agree
    lifted      the same for models that write into tensors they make
    shielded    the same for models with gradient checkpointing
    one by one  anything
"""

from __future__ import annotations

import logging
import random
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
from terrine.sgd.clipping.state import ModuleState, held_by

log = logging.getLogger("terrine.sgd")

Outputs = tuple[list[Any], Any]
"""The leaves of what a function returned, tensors with the examples first, and how they are nested."""


@dataclass
class Way:
    """How the examples of one model are run."""

    lifted: bool = False
    shielded: bool = False
    one_by_one: bool = False
    steps: int = 0  # that `clipped_sum` took
    costs: dict[Any, Cost] = field(default_factory=dict)  # of one example, by the shapes of its inputs

    def give_way(self, model: nn.Module, failure: Exception) -> None:
        """Choose the next way after a failure.

        Raises: the failure, where it is one of ours or there is no other way.
        """
        if isinstance(failure, TerrineError | Divided) or self.one_by_one or "same device" in str(failure):
            raise failure
        if _CHECKPOINTED in str(failure) and not self.shielded:
            self.shielded = True
        elif not self.lifted:
            self.lifted = True
        else:
            self.one_by_one = True
            reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
            log.warning("%s: one example at a time, exact but slow (%s)", type(model).__name__, reason)


def way_of(model: nn.Module) -> Way:
    """How this model is run, as far as is known."""
    return _WAYS.setdefault(model, Way())


_WAYS: weakref.WeakKeyDictionary[nn.Module, Way] = weakref.WeakKeyDictionary()
CHECKED_EVERY = 100  # steps: how often two examples are tried together
_CHECKPOINTED = "terrine: saved tensors are recomputed"


def together(
    function: Callable[..., Any],
    rows: Sequence[Tensor],
    recording: Recording,
    modules: Sequence[nn.Module] = (),
    state: ModuleState | None = None,
) -> Outputs:
    """`function` of every example's rows, under vmap.

    Raises:
        InvalidArgument: one of the modules keeps something of an example.
        Divided: examples gave different answers to Python; those that agree can be run together.
    """
    kept: list[Outputs] = []
    before = [held_by(module) for module in modules]
    if state is not None:
        state.restore()
        recording.state = state

    def one(marker: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
        recording.begin(marker, row)
        with recording:
            leaves, nesting = pytree.tree_flatten(function(*row))
            leaves = [recording.output(leaf) for leaf in leaves]
        if recording.escaped is not None:  # and was caught by a bare except
            raise recording.escaped
        _refuse_kept(modules, before, recording)
        kept.append((leaves, nesting))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    marker = torch.zeros(recording.examples, device=rows[0].device)
    hooks = nullcontext() if recording.shielded else torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED)
    try:
        with hooks:
            found = torch.vmap(one, randomness="different")(marker, *rows)
    except Escaped as escaped:
        raise escaped.failure from None
    if state is not None:
        state.check(recording.asked)
    (leaves, nesting), made = kept[0], iter(found)
    return [next(made) if isinstance(leaf, Tensor) else leaf for leaf in leaves], nesting


def _refuse_kept(modules: Sequence[nn.Module], before: list[list[Any]], recording: Recording) -> None:
    for module, held in zip(modules, before, strict=True):
        known = set(map(id, held))
        new = [tensor for tensor in held_by(module) if id(tensor) not in known]
        if new and any(recording.batched(new)):
            raise InvalidArgument(
                f"{type(module).__name__}: an attribute keeps a tensor of the examples, in which those of an earlier "
                "lot would meet later ones; want a forward pass that keeps nothing"
            )


def groups(answers: Sequence[Any], each: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """The examples of units that can run together, group by group, and those of units that have to run alone.

    A unit is `each` examples that follow each other. Those whose examples all gave one answer run with others that
    gave the same, unless hardly two agree.
    """
    found: dict[str, list[Tensor]] = {}
    alone: list[Tensor] = []
    for unit in torch.arange(len(answers)).split(each):
        told = {repr(answers[index]) for index in unit.tolist()}
        if len(told) == 1:
            found.setdefault(told.pop(), []).append(unit)
        else:
            alone.append(unit)
    if 2 * len(found) * each > len(answers):
        return [], list(torch.arange(len(answers)).split(each))
    return [torch.cat(units) for units in found.values()], alone


def each_alone(function: Callable[..., Tensor], rows: Sequence[Tensor], modules: Sequence[nn.Module] = ()) -> Tensor:
    """`function` of every example's rows as lots of one, examples first; one after the other where vmap cannot."""
    before, state = generators.states(rows[0].device), ModuleState(modules)
    try:
        alone = Recording({}, len(rows[0]))
        found, _ = together(lambda *row: function(*(one.unsqueeze(0) for one in row)), rows, alone, modules, state)
        return found[0]  # type: ignore[no-any-return]
    except TerrineError:
        raise
    except Exception:  # whatever vmap cannot do
        generators.restore(before, rows[0].device)
        apart = [[row[i : i + 1] for row in rows] for i in range(len(rows[0]))]
        return torch.stack([one_alone(function, row, state) for row in apart])


def one_alone(function: Callable[..., Any], row: Sequence[Tensor], state: ModuleState) -> Any:
    """`function` of one example's row, without vmap."""
    watch = Recording({}, 1)
    watch.begin(None, row)
    state.restore()
    state.about_to_read()  # nothing tells what Python learns of it, by a shape, a slice or an error
    watch.state = state
    with watch:
        found = function(*row)
    state.check(asked=True)
    return found


def check_company(
    whole: Callable[[list[Tensor]], Any],
    alone: Callable[..., Any],
    rows: Sequence[Tensor],
    modules: Sequence[nn.Module] = (),
) -> None:
    """The seat belt: tries two random examples together and alone, with all that is random held still.

    Nothing depends on it but what its user thinks a model does: examples are apart all the same.

    Raises: InvalidArgument where `whole` of both is not `alone` of each.
    """
    if len(rows[0]) < 2:
        return
    pair = torch.tensor(random.SystemRandom().sample(range(len(rows[0])), 2), device=rows[0].device)
    given = [row[pair] for row in rows]
    before = generators.states(rows[0].device)
    watch = Recording({}, 1, still=True)
    state = ModuleState(modules)
    try:
        calls = [(whole, given), *((lambda row: alone(*row), [row[i] for row in given]) for i in (0, 1))]
        found = [_leaves(watch, function, lot, state) for function, lot in calls]
    except TerrineError:
        raise
    except Exception:  # a model that cannot take two examples has none to mix
        return
    finally:
        state.restore()
        generators.restore(before, rows[0].device)
    numbers = [one for one in (*given, *found[0]) if one.is_floating_point()]
    rounding = max((_reach(one) * 1e3 * torch.finfo(one.dtype).eps for one in numbers), default=0.0)
    weighs = watch.ignores or any(getattr(module, "weighs_examples", False) for module in modules)
    for both, one, other in () if watch.drawn else zip(*found, strict=False):
        if not _is_joined(both, one, other, rounding, weighs):
            fits = both.numel() == 2 * one.numel() or both.dim() == 0
            what = (
                "other numbers than each has alone" if fits else f"outputs of shape {tuple(both.shape)}, not twice one"
            )
            raise InvalidArgument(
                f"two examples together have {what} ({tuple(one.shape)}): the model or the loss mixes examples, by "
                "batch statistics, a sum or a branch over the lot, or has no dimension for them; want every example "
                "treated by itself, and examples as the outputs' first dimension"
            )


def _leaves(
    watch: Recording, function: Callable[[list[Tensor]], Any], given: list[Tensor], state: ModuleState
) -> list[Tensor]:
    """The floating-point tensors that a function of a lot returns; every call begins with the same generators."""
    state.restore()
    watch.state = state
    given = [one.clone() for one in given]  # which it may write to
    watch.begin(None, given)
    before = generators.states(given[0].device)
    with torch.no_grad(), generators.untouched():
        with watch:
            found = pytree.tree_leaves(function(given))
        watch.drawn |= not all(map(torch.equal, before, generators.states(given[0].device)))
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_joined(both: Tensor, one: Tensor, other: Tensor, rounding: float, weighs: bool) -> bool:
    """Whether an output for two examples is that of each, side by side; or the sum or mean of their losses.

    Where labels are ignored, or a loss is a mean over what an example has several of, such as tokens, the mean over
    all of two examples' `weighs` one's more than the other's.
    """
    if one.dim() == both.dim() == 0:
        expected = [
            one + other,
            (one + other) / 2,
            *([both.clamp(min(one, other), max(one, other))] if weighs else []),
        ]
        return any(_close(both, value, rounding) for value in expected)
    if one.dim() == both.dim() - 1:
        return both.shape[1:] == one.shape and _close(both, torch.stack([one, other]), rounding)
    pairs = (torch.cat([one, other], axis) for axis in range(one.dim()) if one.shape == other.shape)
    return any(pair.shape == both.shape and _close(both, pair, rounding) for pair in pairs)


def _close(one: Tensor, other: Tensor, rounding: float) -> bool:
    finite = torch.isfinite(one) & torch.isfinite(other)
    one, other = torch.where(finite, one, 0.0), torch.where(finite, other, 0.0)
    half = one.dtype in (torch.float16, torch.bfloat16)
    reach = _reach(one)
    return bool(torch.allclose(one, other, 0.0, (0.05 if half else 1e-3) * reach + rounding))


def _reach(tensor: Tensor) -> float:
    """The largest finite number."""
    return float(torch.where(tensor.isfinite(), tensor, 0.0).abs().max()) if tensor.numel() else 0.0
