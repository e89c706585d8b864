"""Linear maps: y = x W^T + b at every position gives g_W = sum_t y'_t x_t^T and g_b = sum_t y'_t."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd import kernels, products
from terrine.sgd.clipping.axis import FRONT, Unfollowed, by_example
from terrine.sgd.clipping.contribution import Contribution, Dense, Outer, lengths, rounded_up, wide
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.rules.elementwise import reduced
from terrine.sgd.clipping.single import SMALL, Single, vector
from terrine.sgd.clipping.tape import COMPUTE, Use, rule_for

Found = list[tuple[Piece, Contribution]]


@rule_for(functional.linear)
def linear(use: Use, gradient: Tensor) -> Found:
    """`functional.linear(x, weight, bias)`, and with it nn.Linear, attention projections and tied output layers."""
    inputs, weight, bias = use.argument(0, "input"), use.piece(1, "weight"), use.piece(2, "bias")
    if gradient.dim() == 2 and use.where == FRONT and len(gradient) == use.examples and _is_plain(inputs, gradient):
        return _once(inputs.detach(), gradient, weight, bias, use.extra)
    found = outer(use, inputs, gradient, weight, bias)
    if use.extra is not None and isinstance(found[0][1], Outer):
        found[0][1].input_lengths = use.extra
    return found


def _computed(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None] | None:
    """The linear map by another way than the library's, where that is faster; the inputs' lengths if known."""
    found = _in_one_pass(inputs, weight, bias)
    if found is not None:
        return found
    out = products.linear(inputs, weight, bias)
    return None if out is None else (out, None)


def _in_one_pass(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Output and lengths of fixed wide features, which come from memory once for both."""
    if inputs.requires_grad or inputs.dim() != 2 or inputs.numel() < 1 << 20:
        return None
    if inputs.shape[1] < 8 * weight.shape[0] or torch.is_autocast_enabled("cpu") or not kernels.take(inputs, weight):
        return None
    output, squares = kernels.applied(inputs, weight.detach())
    return output if bias is None else output.add_(bias), rounded_up(squares.sqrt_(), inputs.shape[1])


COMPUTE[functional.linear] = _computed


@rule_for(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(use: Use, gradient: Tensor) -> Found:
    """`x @ W` with W a matrix: the linear map's weight, transposed."""
    weight = use.piece(1, "other")
    if len(use.pieces) != 1 or weight is None or weight.value.dim() != 2:
        return _masked(use, gradient)
    return _transposed(use, use.args[0], gradient, weight)


@rule_for(torch.addmm)
def addmm(use: Use, gradient: Tensor) -> Found:
    """`addmm(bias, x, W)`: the linear layer of GPT-2."""
    if use.kwargs:
        return _masked(use, gradient)
    found: Found = []
    bias, weight = use.pieces.get(0), use.pieces.get(2)
    if use.pieces.get(1) is not None:
        raise Unfollowed("addmm: a parameter as its second argument")
    if bias is not None:
        found.append((bias, Dense(reduced(gradient, use, tuple(bias.value.shape)))))
    return found + (_transposed(use, use.args[1], gradient, weight) if weight is not None else [])


@rule_for(functional.bilinear)
def bilinear(use: Use, gradient: Tensor) -> Found:
    """y_k = x1 A_k x2 + b_k: a linear map on the products of the two inputs."""
    first, second = use.argument(0, "input1"), use.argument(1, "input2")
    products = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
    return outer(use, products, gradient, use.piece(2, "weight"), use.piece(3, "bias"))


def outer(use: Use, inputs: Tensor, gradient: Tensor, weight: Piece | None, bias: Piece | None) -> Found:
    """The contributions of a linear map and of its bias."""
    gradients = wide(by_example(gradient, use.where, use.examples, 1))
    found: Found = []
    known = lengths(gradients.flatten(1)) if gradients.shape[1] == 1 else None
    sums = gradients.flatten(1) if known is not None else None
    if weight is not None:
        rows = wide(by_example(inputs.detach(), use.where, use.examples, 1))
        part = Outer(rows, gradients, tuple(weight.value.shape), gradient_lengths=known)
        if sums is None and bias is not None and weight.simple:
            sums = part.out_sums()
        found.append((weight, part))
    if bias is not None:
        squares = None if known is None else known.square()
        found.append((bias, vector(bias, gradients.sum(1) if sums is None else sums, squares)))
    return found


def _once(inputs: Tensor, gradient: Tensor, weight: Piece | None, bias: Piece | None, known: Tensor | None) -> Found:
    """The same where every example has one position: `inputs` (n, d), `gradient` (n, e)."""
    if weight is None:
        return [] if bias is None else [(bias, vector(bias, gradient))]
    found: Found = []
    squares, of_bias = _squares(inputs, gradient, known)
    if weight.value.numel() < SMALL and weight.simple:
        found.append((weight, Single(inputs, gradient, squares)))
    else:
        shape = tuple(weight.value.shape)
        found.append((weight, Outer(inputs.unsqueeze(1), gradient.unsqueeze(1), shape, _squares=squares)))
    if bias is not None:
        found.append((bias, vector(bias, gradient, of_bias)))
    return found


def _squares(inputs: Tensor, gradient: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The squared norms of weight and bias; the inputs' lengths may be known."""
    if known is None and kernels.take(inputs, gradient):
        return kernels.linear_squares(inputs, gradient)
    reach = lengths(gradient)
    norms = lengths(inputs) if known is None else known
    return norms.mul_(reach).square_(), reach.square_()


def _is_plain(inputs: Tensor, gradient: Tensor) -> bool:
    return inputs.dtype is gradient.dtype and inputs.dtype in (torch.float32, torch.float64)


def _transposed(use: Use, inputs: Tensor, gradient: Tensor, weight: Piece) -> Found:
    rows = wide(by_example(inputs.detach(), use.where, use.examples, 1))
    gradients = wide(by_example(gradient, use.where, use.examples, 1))
    return [(weight, Outer(gradients, rows, tuple(weight.value.shape)))]


def _masked(use: Use, gradient: Tensor) -> Found:
    from terrine.sgd.clipping.rules.generic import masked

    return masked(use, gradient)
