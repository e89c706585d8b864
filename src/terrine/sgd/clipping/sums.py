"""Clipping rules, and the sums they bound: how far one example's gradient may reach.

    Flat        g * min(1, C / |g|)                  one norm over all parameters     [ACG16] Algorithm 1
    PerLayer    the same for each layer and its own C_l; the whole reaches sqrt(sum C_l^2)
    Automatic   g * C / (|g| + stability)            normalises instead of clipping   [BWZ23]

Whatever the rule, what one example adds to the sum has L2 norm at most `rule.bound`. An example whose
gradient is not finite adds nothing. Bounds are moderate: noise relative to them has to fit into single precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from terrine import check
from terrine.errors import InvalidArgument
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.ghost import wide, widest
from terrine.sgd.devices import exact


class ClippingRule(Protocol):
    """What turns squared norms by parameter name, and the norms over all parameters, into factors; all are (n,)."""

    @property
    def bound(self) -> float:
        """The largest L2 norm one example can add to the sum."""
        ...

    def factors(self, squares: Mapping[str, Tensor], norms: Tensor) -> dict[str, Tensor]:
        """The factor of every example, for every parameter; where a norm is not finite it does not matter."""
        ...


@dataclass(frozen=True)
class Flat:
    """Scale an example's whole gradient down to L2 norm `bound` where it is longer."""

    bound: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", _bound("clip", self.bound))

    def factors(self, squares: Mapping[str, Tensor], norms: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(squares, _shrink(norms, self.bound))


@dataclass(frozen=True)
class PerLayer:
    """Scale each layer's gradient to its own bound; keys are parameter names or module paths above them."""

    bounds: Mapping[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.bounds, Mapping) or not self.bounds:
            raise check.refuse("bounds", self.bounds, "a mapping from layer path to bound, not empty")
        object.__setattr__(self, "bounds", {key: _bound(f"bounds[{key!r}]", b) for key, b in self.bounds.items()})

    @property
    def bound(self) -> float:
        return math.sqrt(sum(bound**2 for bound in self.bounds.values()))

    def factors(self, squares: Mapping[str, Tensor], _norms: Tensor) -> dict[str, Tensor]:
        groups: dict[str, list[str]] = {}
        for name in squares:
            groups.setdefault(self._layer(name), []).append(name)
        result: dict[str, Tensor] = {}
        for layer, names in groups.items():
            layer_norms = torch.stack([squares[name] for name in names]).sum(0).sqrt_()
            factor = _shrink(layer_norms, self.bounds[layer])
            result.update(dict.fromkeys(names, factor))
        return result

    def check(self, names: Iterable[str]) -> None:
        """Refuse bounds that do not fit a model with these parameters: one is missing, or one is for nothing.

        A bound for nothing would not be reached by any gradient, and yet be paid for with noise.

        Raises: InvalidArgument, with all that are for nothing.
        """
        idle = self.bounds.keys() - {self._layer(name) for name in names}
        if idle:
            raise InvalidArgument(f"bounds: {', '.join(map(repr, sorted(idle)))} is no trained layer of the model")

    def _layer(self, name: str) -> str:
        path = name
        while path not in self.bounds:
            if not path:
                raise InvalidArgument(f"bounds={sorted(self.bounds)}: want one for {name!r}, or for a module above it")
            path = path.rpartition(".")[0]
        return path


@dataclass(frozen=True)
class Automatic:
    """Scale every example's gradient to almost `bound`, short ones up as well: no threshold to tune."""

    bound: float
    stability: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", check.moderate("clip", self.bound))
        object.__setattr__(self, "stability", check.moderate("stability", self.stability))

    def factors(self, squares: Mapping[str, Tensor], norms: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(squares, self.bound / (norms + self.stability))


def as_rule(clip: float | ClippingRule) -> ClippingRule:
    """A number is a flat bound.

    Raises: InvalidArgument for what is neither a number above 0 nor a rule.
    """
    if hasattr(clip, "factors") and hasattr(clip, "bound"):
        return clip
    return Flat(check.number("clip", clip, "a number > 0 or a clipping rule", "PerLayer takes a bound for each layer"))


def refuse_strange(rule: ClippingRule, names: Iterable[str]) -> None:
    """Refuse a rule for each layer whose layers are not those of a model with these parameters.

    Raises: InvalidArgument, by name.
    """
    if isinstance(rule, PerLayer):
        rule.check(names)


def _bound(name: str, value: float) -> float:
    """A moderate number; infinite, it switches clipping off, which no event covers."""
    return math.inf if value == math.inf else check.moderate(name, value)


def _shrink(norm: Tensor, bound: float) -> Tensor:
    return norm.reciprocal().mul_(bound).clamp_(max=1.0)


class Clipped(NamedTuple):
    """The sum of clipped gradients by parameter name, and each example's norm before clipping.

    Guarantee: adding or removing one example moves `sums`, as one long vector, by at most the rule's bound.
    The norms are private: nothing bounds what they say about an example.
    """

    sums: dict[str, Tensor]
    norms: Tensor


LARGE_LOT = 4096  # units whose sums are kept in the widest type


class ClippedSums:
    """The clipped sums of a lot under way, by parameter name; of very many units in the widest type there is.

    Where thousands of clipped gradients point one way, single precision rounds their sum by a good part of one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], units: int = 0) -> None:
        self._parameters, self._is_large = parameters, units > LARGE_LOT
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
                made = contributions.pop(name).weighted_sum(factor).to(self._type(self._parameters[name]))
                self._totals[name] = self._totals[name].add_(made) if name in self._totals else made
        return norms

    def add_rows(self, gradients: Mapping[str, Tensor], rule: ClippingRule) -> Tensor:
        """The same for gradients that lie in memory example by example."""
        rows: dict[str, Contribution] = {name: Dense(wide(gradient)) for name, gradient in gradients.items()}
        return self.add(rows, {name: row.squares() for name, row in rows.items()}, rule)

    def totals(self) -> dict[str, Tensor]:
        """The sums by parameter name; zero where nothing had a gradient."""
        return {
            name: self._totals[name]
            if name in self._totals
            else torch.zeros_like(parameter, dtype=self._type(parameter))
            for name, parameter in self._parameters.items()
        }

    def _type(self, parameter: Tensor) -> torch.dtype:
        return widest(parameter) if self._is_large else sum_type(parameter)


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
