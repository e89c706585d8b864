"""Parameter views: the tensors that stand for a parameter, or for something made from parameters alone.

A forward pass may use a parameter as it is, a view of it (`weight.chunk(3)`), a broadcast of it
(`token.expand(n, -1, -1)`), or something computed from it (`g * v / |v|`). Each is a parameter
view; what its uses contribute flows back to the parameter at the end:

    view       the same numbers at other places; disjoint views need no cross terms
    lookup     rows of a table by fixed positions: a `Lookup`
    computed   gradients through the small graph that made it, straight to the parameters: whatever lies between is
               part of that graph, and may be used twice in it (`w / w.norm()`). Per-example gradients of a large one
               are not kept: their norms are taken a few examples at a time, and as the graph's backward pass is
               linear, their weighted sum goes through it as one
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.clipping.contribution import Contribution, Dense, Lookup, combined
from terrine.sgd.clipping.ghost import squared_norms, wide


@dataclass(eq=False, slots=True)
class ParameterView:
    """`value` is what the forward pass computes with; `graph` is the same with its history."""

    value: Tensor
    graph: Tensor
    name: str = ""
    parents: tuple[ParameterView, ...] = ()
    tokens: Tensor | None = None
    uses: int = 0
    contributions: list[Contribution] = field(default_factory=list)
    views: list[ParameterView] = field(default_factory=list)

    @property
    def simple(self) -> bool:
        """Used once, as it is: its norms need nothing else."""
        return self.uses == 1 and self.name != "" and not self.views


def settle(params: list[ParameterView], units: int) -> None:
    """Carry the contributions of every derived view to the parameters, the last made first."""
    for param in reversed(params):
        if param.parents and param.contributions and not is_view(param):
            _carry(param, combined(param.contributions), units)


def is_view(param: ParameterView) -> bool:
    """Whether a derived view is the parameter's own memory, no number twice."""
    return bool(param.parents) and any(param is view for view in param.parents[0].views)


def merged(root: ParameterView) -> Contribution:
    """One contribution for a parameter and all its views."""
    if not root.views:
        return combined(root.contributions)
    parts = [root, *(view for view in root.views if view.contributions)]
    parts = [part for part in parts if part.contributions]
    if len(parts) == 1 and parts[0] is root:
        return combined(root.contributions)
    places = [_place(part.value, root.value) for part in parts]
    mixed = DisjointViews([combined(part.contributions) for part in parts], places, tuple(root.value.shape))
    return mixed if mixed.disjoint() else Dense(mixed.dense())


@dataclass
class DisjointViews:
    """Contributions to disjoint views of one parameter: squares add, and every sum goes to its place."""

    parts: list[Contribution]
    places: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    shape: tuple[int, ...]

    def disjoint(self) -> bool:
        seen = torch.zeros(self._numbers(), dtype=torch.uint8)
        for place in self.places:
            seen.as_strided(*place).add_(1)
        return int(seen.max()) <= 1

    def squares(self) -> Tensor:
        return torch.stack([part.squares() for part in self.parts]).sum(0)

    def weighted_sum(self, factor: Tensor) -> Tensor:
        parts = [part.weighted_sum(factor) for part in self.parts]
        total = parts[0].new_zeros(self._numbers())
        for part, place in zip(parts, self.places, strict=True):
            total.as_strided(*place).add_(part)
        return total.view(self.shape)

    def dense(self) -> Tensor:
        parts = [wide(part.dense()) for part in self.parts]
        rows = parts[0].new_zeros(len(parts[0]), self._numbers())
        for part, (size, stride, offset) in zip(parts, self.places, strict=True):
            rows.as_strided((len(rows), *size), (rows.shape[1], *stride), offset).add_(part)
        return rows.view(-1, *self.shape)

    def drop(self, units: Tensor) -> DisjointViews:
        return DisjointViews([part.drop(units) for part in self.parts], self.places, self.shape)

    def _numbers(self) -> int:
        return int(torch.Size(self.shape).numel())


def shares_memory(view: Tensor, base: Tensor) -> bool:
    """Whether `view` is part of `base`'s memory, each number at most once."""
    same = view.untyped_storage() is base.untyped_storage()
    return same and base.is_contiguous() and all(s > 0 for s, d in zip(view.stride(), view.shape, strict=True) if d > 1)


def _place(view: Tensor, base: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(view.shape), tuple(view.stride()), int(view.storage_offset()) - int(base.storage_offset())


def _carry(param: ParameterView, total: Contribution, units: int) -> None:
    if param.tokens is not None:
        tokens = param.tokens.reshape(1, -1).expand(units, -1)
        table = param.parents[0]
        flat = total.dense().reshape(units, tokens.shape[1], -1)
        table.contributions.append(Lookup(tokens, flat, tuple(table.value.shape)))
        return
    roots = _roots(param)
    graph = _Graph(param.graph, [root.graph for root in roots], total)
    if units * param.value.numel() > _KEPT:
        for index, root in enumerate(roots):
            root.contributions.append(Computed(graph, index))
        return
    for root, gradient in zip(roots, graph.pull_back(total.dense()), strict=True):
        if gradient is not None:
            root.contributions.append(Dense(wide(gradient.detach())))


_KEPT = 1 << 20  # numbers of per-example gradients that are kept
_AT_ONCE = 1 << 22  # numbers of per-example gradients that go through a graph at once


@dataclass
class _Graph:
    """What was computed from some parameters, and what its uses contribute."""

    made: Tensor
    roots: list[Tensor]
    total: Contribution
    _squares: list[Tensor] | None = None

    def pull_back(self, rows: Tensor) -> list[Tensor | None]:
        """The gradients by every parameter, of rows (n, *shape) of gradients by what was made; None for no use."""
        with torch.enable_grad():
            gradients: Any = torch.autograd.grad(
                self.made,
                self.roots,
                rows.to(self.made.dtype),
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
        return list(gradients)

    def squares(self) -> list[Tensor]:
        """Every example's squared norm by every parameter."""
        if self._squares is None:
            rows = self.total.dense()
            parts = rows.split(max(1, _AT_ONCE // self.made.numel()))
            squares = [[self._squared(gradient, part) for gradient in self.pull_back(part)] for part in parts]
            self._squares = [torch.cat(several) for several in zip(*squares, strict=True)]
        return self._squares

    def _squared(self, gradient: Tensor | None, rows: Tensor) -> Tensor:
        return wide(rows).new_zeros(len(rows)) if gradient is None else squared_norms(gradient)


@dataclass
class Computed:
    """The contribution, to one of its parameters, of what was computed from them."""

    graph: _Graph
    index: int

    def squares(self) -> Tensor:
        return self.graph.squares()[self.index]

    def weighted_sum(self, factor: Tensor) -> Tensor:
        return self._pull_back(self.graph.total.weighted_sum(factor).unsqueeze(0)).squeeze(0)

    def dense(self) -> Tensor:
        return self._pull_back(self.graph.total.dense())

    def drop(self, units: Tensor) -> Computed:
        return Computed(_Graph(self.graph.made, self.graph.roots, self.graph.total.drop(units)), self.index)

    def _pull_back(self, rows: Tensor) -> Tensor:
        root = self.graph.roots[self.index]
        (gradient,) = _Graph(self.graph.made, [root], self.graph.total).pull_back(rows)
        return wide(rows).new_zeros(len(rows), *root.shape) if gradient is None else wide(gradient.detach())


def _roots(param: ParameterView) -> list[ParameterView]:
    """The parameters that a view is made from, each once."""
    if not param.parents:
        return [param]
    return list(dict.fromkeys(root for parent in param.parents for root in _roots(parent)))
