"""From norms to the clipped sum: factors by the rule, non-finite examples left out, sums in float32 or wider."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.policy import ClippingRule
from terrine.sgd.clipping.result import Clipped


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32, or wider where the parameter is."""
    return torch.promote_types(dtype, torch.float32)


def zeros(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The clipped sum of nothing."""
    return {
        name: torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device) for name, p in parameters.items()
    }


def add_clipped(
    sums: dict[str, Tensor],
    contributions: Mapping[str, Contribution],
    squares: Mapping[str, Tensor],
    rule: ClippingRule,
    scale: float = 1.0,
) -> Tensor:
    """sums += the clipped gradients, every gradient times `scale` first; returns the norms before clipping."""
    squares = {name: square * scale**2 if scale != 1.0 else square for name, square in squares.items()}
    norms = torch.stack(list(squares.values())).sum(0).sqrt_()
    broken = ~torch.isfinite(norms)
    if bool(broken.any()):
        contributions = {name: part.drop(broken) for name, part in contributions.items()}
    for name, factor in rule.factors(squares).items():
        contributions[name].add_to(sums[name], factor * scale if scale != 1.0 else factor)
    return norms


def clip_rows(sums: dict[str, Tensor], gradients: Mapping[str, Tensor], rule: ClippingRule) -> Tensor:
    """The same for gradients that lie in memory example by example."""
    rows = {name: Dense(g.to(wide(g.dtype))) for name, g in gradients.items()}
    return add_clipped(sums, rows, {name: row.squares() for name, row in rows.items()}, rule)


def joined(parts: list[Clipped]) -> Clipped:
    """Lots clipped apart, as one."""
    sums = {name: sum((part.sums[name] for part in parts[1:]), parts[0].sums[name]) for name in parts[0].sums}
    return Clipped(sums, torch.cat([part.norms for part in parts]))
