"""Normalisation with a trained scale and shift: y = scale * x' + shift, where x' is x normalised within an example.

Position by position, g_scale = sum_t y'_t x'_t and g_shift = sum_t y'_t. The forward pass is one call on all examples;
x' is computed again from x when the output's gradient is known, instead of being kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.contribution import Dense
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.use import Found, Use, call, rule_for


def _all_groups(use: Use) -> Tensor:
    """Group normalisation of (n * m, channels, ...), where every example has m: groups never reach further than one."""
    others = {name: value for name, value in use.kwargs.items() if name != "input"}
    use.args, use.kwargs, use.folded = (use.argument(0, "input").flatten(0, 1), *use.args[1:]), others, True
    return call(use)


@rule_for(functional.group_norm, forward=_all_groups)
def group_norm(use: Use, gradient: Tensor) -> Found:
    """`functional.group_norm(x, groups, weight, bias, eps)`."""
    weight, bias = use.parameter(2, "weight"), use.parameter(3, "bias")
    gradient = wide(gradient).reshape(*gradient.shape[:2], -1)
    found: Found = []
    if weight is not None:
        x, eps = wide(use.args[0].detach()), use.argument(4, "eps", 1e-5)
        x = functional.group_norm(x, use.argument(1, "num_groups"), None, None, eps).reshape(gradient.shape)
        found.append((weight, Dense((gradient * x).sum(2)).of_units(use.units)))
    if bias is not None:
        found.append((bias, Dense(gradient.sum(2)).of_units(use.units)))
    return found


@rule_for(functional.layer_norm)
def layer_norm(use: Use, gradient: Tensor) -> Found:
    """`functional.layer_norm(x, shape, weight, bias, eps)`."""
    x, shape, eps = use.argument(0, "input"), use.argument(1, "normalized_shape"), use.argument(4, "eps", 1e-5)
    found: Found = []
    if (weight := use.parameter(2, "weight")) is not None:
        x = functional.layer_norm(wide(x.detach()), shape, None, None, eps)
        found.append((weight, _summed_products(use, gradient, x, tuple(shape))))
    if (bias := use.parameter(3, "bias")) is not None:
        found.append((bias, Dense(wide(gradient).reshape(use.units, -1, *shape).sum(1))))
    return found


@rule_for(functional.rms_norm)
def rms_norm(use: Use, gradient: Tensor) -> Found:
    """`functional.rms_norm(x, shape, weight, eps)`, which has no shift."""
    ((_, weight),) = use.params.items()
    shape, eps = use.argument(1, "normalized_shape"), use.argument(3, "eps")
    x = use.argument(0, "input").detach()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return [(weight, _summed_products(use, gradient, functional.rms_norm(wide(x), shape, None, eps), tuple(shape)))]


def _summed_products(use: Use, gradient: Tensor, x: Tensor, shape: tuple[int, ...]) -> Dense:
    return Dense((wide(gradient) * x).reshape(use.units, -1, *shape).sum(1))
