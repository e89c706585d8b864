"""From norms to the clipped sum: factors by the rule, non-finite examples left out, sums in float32 or wider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.policy import Automatic, ClippingRule, Flat
from terrine.sgd.precision import exact


class Clipped(NamedTuple):
    """The sum of clipped gradients by parameter name, and each example's norm before clipping.

    Guarantee: adding or removing one example moves `sums`, as one long vector, by at most the rule's bound.
    The norms are private: nothing bounds what they say about an example.
    """

    sums: dict[str, Tensor]
    norms: Tensor


class ClippedSums:
    """The clipped sums of a lot under way, by parameter name."""

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
        norms, factors = clipped(squares, rule, scale)
        broken = ~torch.isfinite(norms)
        if broken.any():
            contributions = {name: part.drop(broken) for name, part in contributions.items()}
            factors = {name: factor.masked_fill(broken, 0.0) for name, factor in factors.items()}
        with exact():
            for name, factor in factors.items():
                made = contributions.pop(name).weighted_sum(factor).to(sum_type(self._parameters[name]))
                self._totals[name] = self._totals[name].add_(made) if name in self._totals else made
        return norms

    def add_rows(self, gradients: Mapping[str, Tensor], rule: ClippingRule) -> Tensor:
        """The same for gradients that lie in memory example by example."""
        rows: dict[str, Contribution] = {name: Dense(wide(gradient)) for name, gradient in gradients.items()}
        return self.add(rows, {name: row.squares() for name, row in rows.items()}, rule)

    def totals(self) -> dict[str, Tensor]:
        """The sums by parameter name; zero where nothing had a gradient."""
        return {
            name: self._totals[name] if name in self._totals else torch.zeros_like(parameter, dtype=sum_type(parameter))
            for name, parameter in self._parameters.items()
        }


def sum_type(parameter: Tensor) -> torch.dtype:
    """The type sums are kept in: float32, or wider where the parameter is."""
    return torch.promote_types(parameter.dtype, torch.float32)


def clipped(squares: Mapping[str, Tensor], rule: ClippingRule, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The norms of gradients times `scale`, and what to multiply each example's gradients with."""
    norms = torch.stack(list(squares.values())).sum(0).sqrt_().mul_(scale)
    if scale != 1.0 and not isinstance(rule, Flat | Automatic):  # which look at the norms alone
        squares = {name: square * scale**2 for name, square in squares.items()}
    factors = rule.factors(squares, norms)
    made = {id(factor): factor * scale for factor in factors.values()}  # many parameters share one
    return norms, {name: made[id(factor)] for name, factor in factors.items()}
