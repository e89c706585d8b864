"""Normalisations inside one example: y = x_hat * w + b gives g_w = sum over positions of y' x_hat, g_b = sum of y'."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd import kernels
from terrine.sgd.clipping.axis import Unfollowed, by_example, folded
from terrine.sgd.clipping.contribution import Contribution, wide
from terrine.sgd.clipping.examples import chunks
from terrine.sgd.clipping.piece import Piece
from terrine.sgd.clipping.single import vector
from terrine.sgd.clipping.tape import COMPUTE, Use, rule_for
from terrine.sgd.scratch import scratch

Found = list[tuple[Piece, Contribution]]


@rule_for(functional.layer_norm)
def layer_norm(use: Use, gradient: Tensor) -> Found:
    """Over the last dimensions; the parameters have those dimensions' shape."""
    shape = use.argument(1, "normalized_shape")
    inputs = use.argument(0, "input").detach()
    if use.extra is not None:
        return _with_deviations(use, inputs, gradient, len(shape), use.piece(2, "weight"), use.piece(3, "bias"))
    scaled = functional.layer_norm(inputs, shape, eps=use.argument(4, "eps", 1e-5))
    return _trailing(use, scaled, gradient, len(shape), use.piece(2, "weight"), use.piece(3, "bias"))


def _with_deviations(
    use: Use, inputs: Tensor, gradient: Tensor, dims: int, weight: Piece | None, bias: Piece | None
) -> Found:
    """The sums over positions of y' (x - mean) / deviation and of y', a few examples at a time."""
    tensors = (gradient, inputs, *use.extra)
    y, x, mean, scale = (wide(by_example(tensor, use.where, use.examples, dims)) for tensor in tensors)
    if dims > 1:
        y, x, mean, scale = (tensor.flatten(2) for tensor in (y, x, mean, scale))
    if weight is None:
        return [] if bias is None else [(bias, vector(bias, y.sum(1)))]
    n, positions, width = y.shape
    step = max(1, 2 * _CACHED * torch.get_num_threads() // (positions * width))
    if step >= n:
        rows, sums = _sums(y, x, mean, scale)
    else:
        rows, sums = y.new_empty(2, n, width).unbind(0)
        for start, stop in chunks(n, step):
            part = slice(start, stop)
            room = scratch("products", tuple(y[part].shape), y)
            _sums(y[part], x[part], mean[part], scale[part], room, rows[part], sums[part])
    found: Found = [(weight, vector(weight, rows))]
    return found if bias is None else [*found, (bias, vector(bias, sums))]


def _sums(
    y: Tensor, x: Tensor, mean: Tensor, scale: Tensor,
    room: Tensor | None = None, rows: Tensor | None = None, sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both sums of these examples, (n, width) each; in memory that is given, or their own."""
    apart = torch.sub(x, mean, out=room).mul_(y)
    weighted = torch.bmm(scale.mT, apart, out=None if rows is None else rows.unsqueeze(1))
    return weighted.squeeze(1), torch.sum(y, 1, out=sums)


def _with_mean_and_scale(
    inputs: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
    """Layer norm, and the mean and the reciprocal deviation at every position."""
    if weight is None or inputs.dtype != weight.dtype or torch.is_autocast_enabled("cpu") or inputs.numel() == 0:
        return None
    out, mean, scale = torch.native_layer_norm(inputs, shape, weight, bias, eps)
    return out, (mean.detach(), scale.detach())


COMPUTE[functional.layer_norm] = _with_mean_and_scale


@rule_for(functional.rms_norm, torch.rms_norm)
def rms_norm(use: Use, gradient: Tensor) -> Found:
    """Layer norm without its mean and bias."""
    shape = use.argument(1, "normalized_shape")
    scaled = functional.rms_norm(use.argument(0, "input").detach(), shape, eps=use.argument(3, "eps"))
    return _trailing(use, scaled, gradient, len(shape), use.piece(2, "weight"), None)


@rule_for(functional.group_norm)
def group_norm(use: Use, gradient: Tensor) -> Found:
    """Over groups of channels."""
    inputs = use.argument(0, "input").detach()
    groups, eps = use.argument(1, "num_groups"), use.argument(4, "eps", 1e-5)
    if use.extra is None or use.piece(2, "weight") is None:
        return _channels(use, lambda: functional.group_norm(inputs, groups, eps=eps), gradient, 2, 3, "group_norm")
    fold = folded(gradient.shape, use.where, use.examples, "group_norm")
    weighted, sums = use.extra.rows(gradient)
    pieces = (use.piece(2, "weight"), weighted), (use.piece(3, "bias"), sums)
    return [(piece, vector(piece, _positions(rows, fold))) for piece, rows in pieces if piece is not None]


class Grouped:
    """Group norm of images by kernels: what the way back and the rule both need, which is had at once.

    `pixels` are (n, positions, channels) where channels lie last, else (n, channels, positions).
    """

    def __init__(self, pixels: Tensor, groups: int, weight: Tensor, moments: tuple[Tensor, Tensor], last: bool) -> None:
        self._pixels, self._groups, self._weight, self._moments, self._last = pixels, groups, weight, moments, last
        self._heard: Tensor | None = None
        self._made: tuple[Tensor, Tensor, Tensor] | None = None

    def rows(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias, (n, channels)."""
        _, *rows = self._of(gradient)
        return rows[0], rows[1]

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        made, *_ = self._of(gradient)
        n, channels, *sizes = gradient.shape
        return made.view(n, *sizes, channels).movedim(-1, 1) if self._last else made.view(gradient.shape)

    def _of(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._made is None or self._heard is not gradient:  # the rule hears it first
            laid_out = (_last(gradient) if self._last else gradient.flatten(1)).contiguous()
            back = kernels.grouping().back
            self._made = back(self._pixels, self._groups, self._weight, *self._moments, laid_out, last=self._last)
            self._heard = gradient
        return self._made


class _Through(torch.autograd.Function):
    """Group norm whose weight and bias are constants; `normal`, its output, is no view: it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, _inputs: Tensor, normal: Tensor, grouped: Grouped) -> Tensor:
        ctx.grouped = grouped
        ctx.mark_dirty(normal)
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grouped, ctx.grouped = ctx.grouped, None
        return grouped.back(gradients[0]), None, None


def _last(tensor: Tensor) -> Tensor:
    """(n, positions, channels)."""
    return tensor.movedim(1, -1).flatten(1, -2) if tensor.dim() > 2 else tensor.unsqueeze(1)


_CACHED = 1 << 16  # numbers that stay in a core's cache from one operation to the next


def _grouped(
    inputs: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Grouped] | None:
    """Group norm, and what its way back will find, if kernels know it."""
    if weight is None or bias is None or inputs.numel() == 0 or inputs.shape[1] % groups:
        return None
    if not kernels.take(weight, bias) or inputs.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
        return None
    n, channels, *sizes = inputs.shape
    last = len(sizes) == 2 and not inputs.is_contiguous() and inputs.is_contiguous(memory_format=torch.channels_last)
    pixels = _last(inputs.detach()) if last else inputs.detach().contiguous()
    if last:
        normal = torch.empty(inputs.shape, memory_format=torch.channels_last)
        moments = kernels.grouping().normalise(pixels, groups, weight, bias, eps, _last(normal))
    else:
        with torch.no_grad():
            normal, *moments = torch.native_group_norm(pixels, weight, bias, n, channels, prod(sizes), groups, eps)
    grouped = Grouped(pixels, groups, weight, (moments[0], moments[1]), last)
    return _Through.apply(inputs, normal, grouped), grouped  # type: ignore[no-untyped-call]


COMPUTE[functional.group_norm] = _grouped


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
    weight, bias = use.piece(w, "weight"), use.piece(b, "bias")
    gradient = wide(gradient)
    found: Found = []
    if weight is not None:
        found.append((weight, vector(weight, _positions(gradient * wide(scaled()), fold))))
    if bias is not None:
        found.append((bias, vector(bias, _positions(gradient, fold))))
    return found


def _trailing(use: Use, scaled: Tensor, gradient: Tensor, dims: int, weight: Piece | None, bias: Piece | None) -> Found:
    gradients = wide(by_example(gradient, use.where, use.examples, dims))
    found: Found = []
    if weight is not None:
        rows = wide(by_example(scaled, use.where, use.examples, dims))
        found.append((weight, vector(weight, _once(rows * gradients))))
    if bias is not None:
        found.append((bias, vector(bias, _once(gradients))))
    return found


def _once(rows: Tensor) -> Tensor:
    """The sum over positions; where there is one, the rows themselves."""
    return rows.sum(1) if rows.shape[1] != 1 else rows.squeeze(1)


def _positions(tensor: Tensor, fold: int) -> Tensor:
    """(n, channels): the sum over each channel's positions."""
    sums = tensor.movedim(1, -1).flatten(1, -2).sum(1) if tensor.dim() > 2 else tensor
    return sums if fold == 1 else sums.reshape(-1, fold, *sums.shape[1:]).sum(1)
