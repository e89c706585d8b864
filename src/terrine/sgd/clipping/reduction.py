"""Mean or sum? Found out, not asked: two examples alone against the same two in one lot.

A mean over n examples gives each example's gradient divided by n, a sum gives it whole; anything else, such as a
loss that compares examples, mixes them, and no clipping of it is private.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.examples import Criterion, Lot, call, part
from terrine.sgd.clipping.result import Clipped

MIXED = (
    "the loss of two examples is neither the sum nor the mean of each alone: want a criterion that treats every "
    'example by itself; reduction="none" is always safe'
)


def reduction_scale(alone: tuple[Clipped, Clipped], together: Clipped, *, tolerance: float = 1e-3) -> str:
    """Tell "mean" from "sum" by two examples alone against the same two in one lot (all unclipped, scale 1).

    Raises: InvalidArgument where neither explains the lot: the model or the loss mixes examples.
    """
    norms = torch.cat([alone[0].norms, alone[1].norms])
    for reduction, scale in (("sum", 1.0), ("mean", 2.0)):
        pairs = [(together.sums[n] * scale, alone[0].sums[n] + alone[1].sums[n]) for n in together.sums]
        if all(_close(a, b, tolerance) for a, b in [(together.norms * scale, norms), *pairs]):
            return reduction
    raise InvalidArgument(MIXED)


def refuse_mixing(model: nn.Module, x: Lot) -> None:
    """Once for each model: two examples' outputs alone against the same two together.

    A model that draws random numbers (dropout) cannot be compared with itself and is taken as it is.
    Raises: InvalidArgument where an example's output depends on the other.
    """
    if model in _sound:
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            both, again, first, second = (
                _leaves(call(model, part(x, start, stop))) for start, stop in ((0, 2), (0, 2), (0, 1), (1, 2))
            )
    except (RuntimeError, ValueError):
        return  # cannot run on one example; what is wrong with it shows when the lot runs
    for pair, same, one, other in zip(both, again, first, second, strict=False):
        if pair.shape[:1] != (2,) or one.shape[:1] != (1,) or not _close(pair, same):
            continue
        if not _close(pair, torch.cat([one, other]), 1e-3):
            raise InvalidArgument(
                "the model's outputs for two examples are not those for each alone: it mixes examples, and no "
                "clipping of it is private; look for statistics or comparisons over the first dimension"
            )
    _sound.add(model)


_sound: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _leaves(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if _real(leaf)]


def is_mean(criterion: Criterion, output: Any, y: Lot, loss: Tensor) -> bool:
    """Whether the criterion is a mean over the lot, by its gradients for two examples' outputs.

    Raises: InvalidArgument where it is neither a mean nor a sum.
    """
    if loss.dim() > 0 or (y if isinstance(y, Tensor) else pytree.tree_leaves(y)[0]).shape[0] == 1:
        return False
    key = getattr(criterion, "reduction", None)
    try:
        known = _seen.get(criterion)
        if known is None:
            known = _seen[criterion] = {}
    except TypeError:
        known = {}
    if key not in known:
        known[key] = _tell(criterion, output, y)
    return known[key]


_seen: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def _tell(criterion: Criterion, output: Any, y: Lot) -> bool:
    first, second = _pull(criterion, output, y, 0, 1), _pull(criterion, output, y, 1, 2)
    both = _pull(criterion, output, y, 0, 2)
    expected = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    if all(_close(a, b) for a, b in zip(both, expected, strict=True)):
        return False
    if all(_close(2 * a, b) for a, b in zip(both, expected, strict=True)):
        return True
    raise InvalidArgument(MIXED)


def _pull(criterion: Criterion, output: Any, y: Lot, start: int, stop: int) -> list[Tensor]:
    """The gradient of the criterion with respect to these examples' outputs."""
    alone = pytree.tree_map(
        lambda t: t[start:stop].detach().requires_grad_() if _real(t) else t[start:stop] if _rows(t) else t, output
    )
    leaves = [leaf for leaf in pytree.tree_leaves(alone) if _real(leaf) and leaf.requires_grad]
    loss = criterion(alone, part(y, start, stop))
    gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _close(first: Tensor, second: Tensor, tolerance: float = 1e-4) -> bool:
    size = max(float(first.abs().max()), float(second.abs().max())) if first.numel() else 0.0
    return bool(torch.allclose(first, second, rtol=tolerance, atol=tolerance * size + 1e-30, equal_nan=True))
