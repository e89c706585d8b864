"""What a criterion does with its lot, found by trying: it adds its examples up, averages them, or mixes them.

A second witness: the isolation check (isolation/) decides. This compares the gradients of two examples alone and in
company where a loss was divided by a number that may be the lot's size, and for the message of a refusal.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from terrine.errors import InvalidArgument, TerrineError

_TOLERANCE = 1e-3


class Reduction(enum.Enum):
    """How per-example losses become one number."""

    SUM = "sum"
    MEAN = "mean"

    def scale(self, size: int) -> float:
        """What undoes the reduction over `size` examples."""
        return float(size) if self is Reduction.MEAN else 1.0


def of_criterion(criterion: Callable[[Any, Any], Tensor], output: Any, target: Any, size: int) -> Reduction:
    """The reduction of `criterion`, tried on a lot of at least two examples.

    Raises:
        InvalidArgument: the loss mixes examples, or has no batch dimension.
    """

    refuse_shared_denominator(criterion, target)

    def loss(leaves: list[Any]) -> Tensor:
        rows = iter(leaves)
        return criterion(*tree_map(lambda _: next(rows), (output, target)))

    return _compare(loss, tree_flatten((output, target))[0], size, len(tree_flatten(output)[0]))


def refuse_shared_denominator(criterion: Any, target: Any) -> None:
    """Refuse a mean that is divided by more than the number of examples: every example moves every other's share."""
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion.reduction != "mean":
        return
    shared = "the weights of the whole lot's labels" if criterion.weight is not None else ""
    labels = isinstance(target, Tensor) and not target.is_floating_point() and target.numel() > 0
    if labels and int(target.min()) <= criterion.ignore_index and bool((target == criterion.ignore_index).any()):
        shared = f"the number of labels that are not ignore_index={criterion.ignore_index}"
    if shared:
        raise InvalidArgument(
            f"{type(criterion).__name__}: its mean is divided by {shared}, so it mixes examples; "
            'want reduction="sum" or "none"'
        )


def _compare(loss: Callable[[list[Any]], Tensor], leaves: list[Any], size: int, outputs: int) -> Reduction:
    """`leaves` are the outputs, then everything else; two examples alone, twice, against the same in the lot."""
    many = min(2, size - 1)
    whole = _gradients(loss, list(leaves), outputs)
    left = [(Reduction.SUM, 1.0), (Reduction.MEAN, size / many)]
    for rows in (slice(0, many), slice(size - many, size)):
        try:
            alone = _gradients(loss, [_rows(leaf, rows, size) for leaf in leaves], outputs)
        except (RuntimeError, ValueError, IndexError) as failure:
            if isinstance(failure, TerrineError):
                raise
            raise InvalidArgument(f"{MIXED} (alone, it fails: {failure})") from failure
        pairs = [(one, _rows(other, rows, size)) for one, other in zip(alone, whole, strict=True)]
        left = [(kind, ratio) for kind, ratio in left if all(_fits(one, other, ratio) for one, other in pairs)]
    if not left:
        raise InvalidArgument(MIXED)
    return left[0][0]


MIXED = (
    "the loss of two examples changes in the company of others: it is neither a sum nor a mean of each one's own, so "
    "it mixes examples and no clipping bounds one of them; want a criterion that treats every example by itself"
)


def _gradients(loss: Callable[[list[Any]], Tensor], leaves: list[Any], outputs: int) -> list[Tensor]:
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    floating = [
        leaf.requires_grad_() for leaf in leaves[:outputs] if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        value = loss(leaves)
        if not isinstance(value, Tensor):
            raise InvalidArgument(f"criterion: want a tensor, got {type(value).__name__}")
        if not value.requires_grad:
            return [torch.zeros_like(leaf) for leaf in floating]
        found = torch.autograd.grad(value.sum(), floating, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(floating, found, strict=True)]


def _rows(leaf: Any, rows: slice, size: int) -> Any:
    return leaf[rows] if _has_rows(leaf, size) else leaf


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def close(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether two tensors are the same up to rounding, relative to the largest number that is finite."""
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    one, other = torch.where(finite, one, 0.0), torch.where(finite, other, 0.0)
    reach = max(float(one.abs().max()), float(other.abs().max()), 1e-30) if one.numel() else 1.0
    return bool(torch.allclose(one, other, rtol=tolerance, atol=tolerance * reach))


def _fits(alone: Tensor, whole: Tensor, ratio: float) -> bool:
    half = alone.dtype in (torch.float16, torch.bfloat16)
    return close(alone, whole * ratio, 20 * _TOLERANCE if half else _TOLERANCE)
