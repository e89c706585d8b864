"""A batch: tensors in tuples, lists or dicts, whose first dimension counts the examples, and some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrine import check
from terrine.errors import InvalidArgument


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


def make_up_rows(leaves: Sequence[Any], values: Sequence[int]) -> list[Any]:
    """Return leaves of the same format with one constant row for each value: they tell nothing of a batch."""
    return [
        leaf.new_tensor(values).view(-1, *[1] * (leaf.dim() - 1)).expand(-1, *leaf.shape[1:]).clone()
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]


class Rows:
    """Some rows of a batch, whose leaves are those of the whole batch."""

    def __init__(self, leaves: list[Any], nesting: Any, which: slice | Tensor = slice(None)) -> None:
        self._leaves, self._nesting = leaves, nesting
        held = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self.tensors = [leaf[which if isinstance(which, slice) else which.to(leaf.device)] for leaf in held]
        self.size = len(self.tensors[0])
        self.key = tuple(leaf.shape[1:] for leaf in self.tensors)

    def take(self, index: int) -> list[Tensor]:
        """One row of every tensor, in memory of its own."""
        return [tensor[index].clone() for tensor in self.tensors]

    def select(self, which: Tensor) -> Rows:
        """Some of these rows."""
        rows = iter(self.tensors)
        leaves = [next(rows) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return Rows(leaves, self._nesting, as_slice(which))

    def nest_all(self) -> Any:
        """All rows as a batch."""
        parts = iter(self.tensors)
        leaves = [next(parts) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._nesting)

    def nest(self, row: Sequence[Tensor]) -> Any:
        """One row of every tensor as a batch of one."""
        parts = iter(row)
        return pytree.tree_unflatten(
            [next(parts).unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves], self._nesting
        )


def group_by_rows(people: Sequence[int] | None, size: int) -> list[tuple[int, Tensor, Tensor]]:
    """Units with equally many rows: how many, which units, and where each one's rows begin."""
    if people is None:
        return [(1, torch.arange(size), torch.arange(size))]
    counts = torch.tensor(people)
    starts = counts.cumsum(0) - counts
    groups = [(each, (counts == each).nonzero().flatten()) for each in dict.fromkeys(people)]
    return [(each, who, starts[who]) for each, who in groups]


def check_people(rows: Sequence[int], size: int) -> list[int]:
    """How many rows each person has.

    Raises: InvalidArgument where they are not those of the batch.
    """
    counts = [check.whole("rows", count) for count in rows]
    if sum(counts) != size:
        raise InvalidArgument(f"rows: {sum(counts)} in all for a batch of {size}; want every row to be somebody's")
    return counts


def as_slice(which: Tensor) -> slice | Tensor:
    """Indices that follow each other as a slice, which copies nothing."""
    first, last = int(which[0]), int(which[-1])
    return slice(first, last + 1) if last - first == len(which) - 1 and bool((which.diff() == 1).all()) else which
