"""From norms to the clipped sum: factors by the rule, non-finite examples left out, sums in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.policy import Automatic, ClippingRule, Flat
from terrine.sgd.precision import exact


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32, or wider where the parameter is."""
    return torch.promote_types(dtype, torch.float32)


def added(squares: list[Tensor]) -> Tensor:
    """The sum of equally long vectors, in memory of its own."""
    if len(squares) > 3:
        return torch.stack(squares).sum(0)
    first, *others = squares
    total = first + others[0] if others else first.clone()
    return total.add_(others[1]) if len(others) > 1 else total


def _roots(squares: Tensor) -> Tensor:
    """Square roots in place, by numpy: torch's load a part of its library that a small step does without."""
    if squares.device.type != "cpu":
        return squares.sqrt_()
    with np.errstate(invalid="ignore"):  # nan is counted out later
        np.sqrt(squares.numpy(), out=squares.numpy())
    return squares


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
        norms = _roots(added(list(squares.values())))
        if scale != 1.0:
            norms.mul_(scale)
            if not isinstance(rule, Flat | Automatic):  # which look at the norms alone
                squares = {name: square * scale**2 for name, square in squares.items()}
        factors = rule.factors(squares, norms)
        if not math.isfinite(float(norms.sum())):
            broken = ~torch.isfinite(norms)
            contributions = {name: part.drop(broken) for name, part in contributions.items()}
            factors = {name: factor.masked_fill(broken, 0.0) for name, factor in factors.items()}
        if scale != 1.0:
            factors = _times(factors, scale)
        with exact():
            for name, factor in reversed(factors.items()):  # the last layer's activations are the next one's inputs
                self._add(name, contributions.pop(name), factor)
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
