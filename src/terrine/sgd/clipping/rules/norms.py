"""Normalisations inside one example: y = x_hat * w + b gives g_w = sum over positions of y' x_hat, g_b = sum of y'."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from terrine.sgd.clipping.axis import by_example
from terrine.sgd.clipping.contribution import Contribution, Dense
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.rules.linear import wide
from terrine.sgd.clipping.tape import Unfollowed, Use, rule_for

Found = list[tuple[Piece, Contribution]]


@rule_for(F.layer_norm)
def layer_norm(use: Use, gradient: Tensor) -> Found:
    """Over the last dimensions; the parameters have those dimensions' shape."""
    shape = use.argument(1, "normalized_shape")
    inputs = use.argument(0, "input").detach()
    scaled = F.layer_norm(inputs, shape, eps=use.argument(4, "eps", 1e-5))
    return _trailing(use, scaled, gradient, len(shape), use.piece(2, "weight"), use.piece(3, "bias"))


@rule_for(F.rms_norm, torch.rms_norm)
def rms_norm(use: Use, gradient: Tensor) -> Found:
    """Layer norm without its mean and bias."""
    shape = use.argument(1, "normalized_shape")
    scaled = F.rms_norm(use.argument(0, "input").detach(), shape, eps=use.argument(3, "eps"))
    return _trailing(use, scaled, gradient, len(shape), use.piece(2, "weight"), None)


@rule_for(F.group_norm)
def group_norm(use: Use, gradient: Tensor) -> Found:
    """Over groups of channels: with the group's mean m and deviation s, sum y' x_hat = (sum y' x - m sum y') / s."""
    inputs = use.argument(0, "input").detach()
    if use.where != (0, 1):
        raise Unfollowed("group_norm: examples are not the first dimension")
    weight, bias = use.piece(2, "weight"), use.piece(3, "bias")
    groups = use.argument(1, "num_groups")
    shift = wide(gradient).flatten(2).sum(2)
    found: Found = []
    if weight is not None:
        scaled = F.group_norm(inputs, groups, eps=use.argument(4, "eps", 1e-5))
        found.append((weight, Dense(_products(wide(gradient), wide(scaled)))))
    if bias is not None:
        found.append((bias, Dense(shift)))
    return found


@rule_for(F.instance_norm)
def instance_norm(use: Use, gradient: Tensor) -> Found:
    """Each channel of each example by itself; running statistics would remember other examples."""
    inputs = use.argument(0, "input").detach()
    if use.where != (0, 1) or not use.argument(5, "use_input_stats", True):
        raise Unfollowed("instance_norm: running statistics, or examples not in the first dimension")
    found: Found = []
    weight, bias = use.piece(3, "weight"), use.piece(4, "bias")
    if weight is not None:
        scaled = F.instance_norm(inputs, eps=use.argument(7, "eps", 1e-5))
        found.append((weight, Dense(_products(wide(gradient), wide(scaled)))))
    if bias is not None:
        found.append((bias, Dense(wide(gradient).flatten(2).sum(2))))
    return found


def _trailing(
    use: Use, scaled: Tensor, gradient: Tensor, dims: int, weight: Piece | None, bias: Piece | None
) -> Found:
    gradients = wide(by_example(gradient, use.where, use.examples, dims))
    found: Found = []
    if weight is not None:
        rows = wide(by_example(scaled, use.where, use.examples, dims))
        found.append((weight, Dense((rows * gradients).sum(1))))
    if bias is not None:
        found.append((bias, Dense(gradients.sum(1))))
    return found


def _products(gradient: Tensor, scaled: Tensor) -> Tensor:
    """(n, channels): the products of both, summed over each channel's positions."""
    return (gradient * scaled).flatten(2).sum(2)
