"""From norms to the clipped sum: factors by the rule, non-finite examples left out, sums in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from terrine.sgd import kernels
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.policy import Automatic, ClippingRule, Flat
from terrine.sgd.precision import exact


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32, or wider where the parameter is."""
    return torch.promote_types(dtype, torch.float32)


def clipped(squares: Mapping[str, Tensor], rule: ClippingRule, scale: float) -> tuple[Tensor, dict[str, Tensor], bool]:
    """The norms of gradients times `scale`, what to multiply each example's gradients with, and if all are finite."""
    parts = list(squares.values())
    if type(rule) is Flat and kernels.take(*parts):
        norms, factor, finite = kernels.clip(parts, scale, rule.bound)
        return norms, dict.fromkeys(squares, factor), finite
    norms = added(parts).sqrt_().mul_(scale)
    if scale != 1.0 and not isinstance(rule, Flat | Automatic):  # which look at the norms alone
        squares = {name: square * scale**2 for name, square in squares.items()}
    factors = _times(rule.factors(squares, norms), scale)
    return norms, factors, math.isfinite(float(norms.sum()))


def added(squares: list[Tensor]) -> Tensor:
    """The sum of equally long vectors, in memory of its own."""
    return torch.stack(squares).sum(0) if len(squares) > 1 else squares[0].clone()


def _times(factors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Every factor times `scale`; many parameters share one."""
    made = {id(factor): factor * scale for factor in {id(one): one for one in factors.values()}.values()}
    return {name: made[id(factor)] for name, factor in factors.items()}


class Sums:
    """The sums of a lot under way: memory is taken, and cleared, only for what has a gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._totals: dict[str, Tensor] = {}

    def add(
        self,
        contributions: dict[str, Contribution],
        squares: Mapping[str, Tensor],
        rule: ClippingRule,
        scale: float = 1.0,
    ) -> Tensor:
        """Add the clipped gradients, every gradient times `scale` first; returns the norms before clipping.

        Takes the contributions out as it goes: what was added needs no memory any more.
        """
        norms, factors, finite = clipped(squares, rule, scale)
        if not finite:
            broken = ~torch.isfinite(norms)
            contributions = {name: part.drop(broken) for name, part in contributions.items()}
            factors = {name: factor.masked_fill(broken, 0.0) for name, factor in factors.items()}
        with exact():
            for name in sorted(factors, key=self._size):  # small sums leave room, of what they needed, for large ones
                self._add(name, contributions.pop(name), factors[name])
        return norms

    def add_rows(self, gradients: Mapping[str, Tensor], rule: ClippingRule) -> Tensor:
        """The same for gradients that lie in memory example by example."""
        rows: dict[str, Contribution] = {name: Dense(g.to(wide(g.dtype))) for name, g in gradients.items()}
        return self.add(rows, {name: row.squares() for name, row in rows.items()}, rule)

    def totals(self) -> dict[str, Tensor]:
        """The sums by parameter name; zero where nothing had a gradient."""
        return {
            name: self._totals[name] if name in self._totals else self._empty(name).zero_() for name in self._parameters
        }

    def _add(self, name: str, part: Contribution, factor: Tensor) -> None:
        fresh = name not in self._totals
        if fresh:
            parameter = self._parameters[name]
            make = getattr(part, "made", None)
            made = None if make is None else make(factor)
            if made is not None:
                self._totals[name] = made.view(parameter.shape).to(wide(parameter.dtype))
                return
            self._totals[name] = self._empty(name)
        part.add_to(self._totals[name], factor, fresh)

    def _size(self, name: str) -> int:
        return self._parameters[name].numel()

    def _empty(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return _room_for(parameter, wide(parameter.dtype))


def _room_for(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for a sum as large as `parameter`: the last lot's, where that is nobody's any more.

    What malloc gets back it gives away in pieces, and then has no room for a sum of that size.
    """
    if parameter.numel() < _LARGE or parameter.device.type != "cpu":
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    kept: Tensor | None = _sums.get(parameter)
    if kept is None or kept.dtype != dtype or kept.shape != parameter.shape or _holders(kept) != _ALONE:
        kept = _sums[parameter] = torch.empty(parameter.shape, dtype=dtype)
    return kept.view(kept.shape)


def _holders(tensor: Tensor) -> float:
    """How many tensors, arrays and the like share its memory; nan, which equals nothing, if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return math.nan if count is None else float(count(tensor.untyped_storage()._cdata))


_LARGE = 1 << 20  # numbers
_sums: WeakIdKeyDictionary = WeakIdKeyDictionary()
_ALONE = _holders(torch.empty(1))
