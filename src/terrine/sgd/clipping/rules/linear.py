"""Linear maps: y = x W^T + b at every position gives g_W = sum_t y'_t x_t^T and g_b = sum_t y'_t."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import Unfollowed, by_example
from terrine.sgd.clipping.contribution import Contribution, Dense, outer
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.rules.elementwise import reduced
from terrine.sgd.clipping.rules.generic import masked
from terrine.sgd.clipping.tape import Use, rule_for

Found = list[tuple[ParameterView, Contribution]]


@rule_for(functional.linear)
def linear(use: Use, gradient: Tensor) -> Found:
    """`functional.linear(x, weight, bias)`, and with it nn.Linear, attention projections and tied output layers."""
    return _linear(use, use.argument(0, "input"), gradient, use.parameter(1, "weight"), use.parameter(2, "bias"))


@rule_for(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(use: Use, gradient: Tensor) -> Found:
    """`x @ W` with W a matrix: the linear map's weight, transposed."""
    weight = use.parameter(1, "other")
    if len(use.params) != 1 or weight is None or weight.value.dim() != 2:
        return masked(use, gradient)
    return _transposed(use, use.args[0], gradient, weight)


@rule_for(torch.addmm)
def addmm(use: Use, gradient: Tensor) -> Found:
    """`addmm(bias, x, W)`: the linear layer of GPT-2."""
    if use.kwargs:
        return masked(use, gradient)
    found: Found = []
    bias, weight = use.params.get(0), use.params.get(2)
    if use.params.get(1) is not None:
        raise Unfollowed("addmm: a parameter as its second argument")
    if bias is not None:
        found.append((bias, Dense(reduced(gradient, use, tuple(bias.value.shape)))))
    return found + (_transposed(use, use.args[1], gradient, weight) if weight is not None else [])


@rule_for(functional.bilinear)
def bilinear(use: Use, gradient: Tensor) -> Found:
    """y_k = x1 A_k x2 + b_k: a linear map on the products of the two inputs."""
    first, second = use.argument(0, "input1"), use.argument(1, "input2")
    products = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
    return _linear(use, products, gradient, use.parameter(2, "weight"), use.parameter(3, "bias"))


def _linear(
    use: Use, inputs: Tensor, gradient: Tensor, weight: ParameterView | None, bias: ParameterView | None
) -> Found:
    """The contributions of a linear map and of its bias."""
    gradients = wide(by_example(gradient, use.where, use.examples, 1))
    found: Found = []
    if weight is not None:
        rows = wide(by_example(inputs.detach(), use.where, use.examples, 1))
        found.append((weight, outer(rows, gradients, tuple(weight.value.shape))))
    if bias is not None:
        found.append((bias, Dense(gradients.sum(1) if gradients.shape[1] > 1 else gradients.squeeze(1))))
    return found


def _transposed(use: Use, inputs: Tensor, gradient: Tensor, weight: ParameterView) -> Found:
    rows = wide(by_example(inputs.detach(), use.where, use.examples, 1))
    gradients = wide(by_example(gradient, use.where, use.examples, 1))
    return [(weight, outer(gradients, rows, tuple(weight.value.shape)))]
