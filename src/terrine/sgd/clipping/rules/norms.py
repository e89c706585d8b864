"""Normalisations inside one example: y = x_hat * w + b gives g_w = sum over positions of y' x_hat, g_b = sum of y'."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import Unfollowed, by_example, folded
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import Use, rule_for

Found = list[tuple[ParameterView, Contribution]]


@rule_for(functional.layer_norm)
def layer_norm(use: Use, gradient: Tensor) -> Found:
    """Over the last dimensions; the parameters have those dimensions' shape."""
    shape = use.argument(1, "normalized_shape")
    scaled = functional.layer_norm(use.argument(0, "input").detach(), shape, eps=use.argument(4, "eps", 1e-5))
    return _trailing(use, scaled, gradient, len(shape), use.parameter(2, "weight"), use.parameter(3, "bias"))


@rule_for(functional.rms_norm, torch.rms_norm)
def rms_norm(use: Use, gradient: Tensor) -> Found:
    """Layer norm without its mean and bias."""
    shape = use.argument(1, "normalized_shape")
    scaled = functional.rms_norm(use.argument(0, "input").detach(), shape, eps=use.argument(3, "eps"))
    return _trailing(use, scaled, gradient, len(shape), use.parameter(2, "weight"), None)


@rule_for(functional.group_norm)
def group_norm(use: Use, gradient: Tensor) -> Found:
    """Over groups of channels."""
    inputs, groups = use.argument(0, "input").detach(), use.argument(1, "num_groups")
    eps = use.argument(4, "eps", 1e-5)
    return _channels(use, lambda: functional.group_norm(inputs, groups, eps=eps), gradient, 2, 3, "group_norm")


@rule_for(functional.instance_norm)
def instance_norm(use: Use, gradient: Tensor) -> Found:
    """Each channel of each example by itself; running statistics would remember other examples."""
    inputs = use.argument(0, "input").detach()
    if not use.argument(5, "use_input_stats", True):
        raise Unfollowed("instance_norm: running statistics")
    eps = use.argument(7, "eps", 1e-5)
    return _channels(use, lambda: functional.instance_norm(inputs, eps=eps), gradient, 3, 4, "instance_norm")


def _channels(use: Use, scaled: Callable[[], Tensor], gradient: Tensor, w: int, b: int, name: str) -> Found:
    """One weight and one bias for each channel, dimension 1."""
    fold = folded(gradient.shape, use.where, use.examples, name)
    weight, bias = use.parameter(w, "weight"), use.parameter(b, "bias")
    gradient = wide(gradient)
    found: Found = []
    if weight is not None:
        found.append((weight, Dense(_positions(gradient * wide(scaled()), fold))))
    if bias is not None:
        found.append((bias, Dense(_positions(gradient, fold))))
    return found


def _trailing(
    use: Use, scaled: Tensor, gradient: Tensor, dims: int, weight: ParameterView | None, bias: ParameterView | None
) -> Found:
    gradients = wide(by_example(gradient, use.where, use.examples, dims))
    found: Found = []
    if weight is not None:
        rows = wide(by_example(scaled, use.where, use.examples, dims))
        found.append((weight, Dense(_once(rows * gradients))))
    if bias is not None:
        found.append((bias, Dense(_once(gradients))))
    return found


def _once(rows: Tensor) -> Tensor:
    """The sum over positions; where there is one, the rows themselves."""
    return rows.sum(1) if rows.shape[1] != 1 else rows.squeeze(1)


def _positions(tensor: Tensor, fold: int) -> Tensor:
    """(n, channels): the sum over each channel's positions."""
    sums = tensor.movedim(1, -1).flatten(1, -2).sum(1) if tensor.dim() > 2 else tensor
    return sums if fold == 1 else sums.reshape(-1, fold, *sums.shape[1:]).sum(1)
