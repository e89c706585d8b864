"""Linear maps: y = x W^T + b at every position gives g_W = sum_t y'_t x_t^T and g_b = sum_t y'_t."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.contribution import Contribution, Dense, outer
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.use import Found, Unfollowed, Use, rule_for


@rule_for(functional.linear)
def linear(use: Use, gradient: Tensor) -> Found:
    """`functional.linear(x, weight, bias)`, and with it nn.Linear, attention projections and tied output layers."""
    return _linear(use, use.argument(0, "input"), gradient, use.parameter(1, "weight"), use.parameter(2, "bias"))


@rule_for(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, data=(0, "input", "self"))
def matmul(use: Use, gradient: Tensor) -> Found:
    """`x @ W` with W a matrix: the linear map's weight, transposed."""
    ((_, weight),) = use.params.items()
    return [_transposed(use, use.argument(0, "input"), gradient, weight)]


def _added(use: Use) -> Tensor:
    if use.kwargs or len(use.args) != 3:
        raise Unfollowed("addmm: alpha and beta, or arguments by name, have no rule")
    bias, inputs, weight = use.args
    found: Tensor = torch.matmul(inputs, weight) + bias
    return found


@rule_for(torch.addmm, data=(1, "mat1"), forward=_added)
def addmm(use: Use, gradient: Tensor) -> Found:
    """`addmm(bias, x, W)`: the linear layer of GPT-2."""
    bias, weight = use.params.get(0), use.params.get(2)
    found: Found = [] if weight is None else [_transposed(use, use.args[1], gradient, weight)]
    if bias is not None:
        found.append((bias, Dense(positions(gradient, use.units).sum(1))))
    return found


@rule_for(functional.bilinear, data=(0, "input1", 1, "input2"))
def bilinear(use: Use, gradient: Tensor) -> Found:
    """y_k = x1 A_k x2 + b_k: a linear map on the products of the two inputs."""
    first, second = use.argument(0, "input1"), use.argument(1, "input2")
    products = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
    return _linear(use, products, gradient, use.parameter(2, "weight"), use.parameter(3, "bias"))


def _linear(
    use: Use, inputs: Tensor, gradient: Tensor, weight: ParameterView | None, bias: ParameterView | None
) -> Found:
    """The contributions of a linear map and of its bias."""
    gradients = positions(gradient, use.units)
    found: Found = []
    if weight is not None:
        found.append((weight, outer(positions(inputs.detach(), use.units), gradients, tuple(weight.value.shape))))
    if bias is not None:
        found.append((bias, Dense(gradients.sum(1) if gradients.shape[1] > 1 else gradients.squeeze(1))))
    return found


def _transposed(
    use: Use, inputs: Tensor, gradient: Tensor, weight: ParameterView
) -> tuple[ParameterView, Contribution]:
    rows, columns = positions(gradient, use.units), positions(inputs.detach(), use.units)
    return weight, outer(rows, columns, tuple(weight.value.shape))


def positions(tensor: Tensor, units: int) -> Tensor:
    """(n, ..., width) as (units, positions, width), in single precision or wider."""
    return wide(tensor).reshape(units, -1, tensor.shape[-1])
