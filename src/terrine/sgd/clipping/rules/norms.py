"""Normalisations inside one example: y = x_hat * w + b gives g_w = sum over positions of y' x_hat, g_b = sum of y'."""

from __future__ import annotations

from collections.abc import Callable
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
from terrine.sgd.scratch import scratch, scratch_like

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
    if isinstance(use.extra, Grouped):
        return _of_channels(use, *use.extra.rows(gradient), fold)
    mean, scale = (wide(moment).view(len(inputs), groups, 1) for moment in use.extra)
    moments = _moments(_last(wide(gradient)), _last(wide(inputs)))
    sums, weighted = (moment.unflatten(1, (groups, -1)) for moment in moments)
    apart = (weighted - mean * sums) * scale  # y' x_hat = (y' x - mean y') / deviation
    return _of_channels(use, apart.flatten(1), sums.flatten(1), fold)


def _of_channels(use: Use, weighted: Tensor, sums: Tensor, fold: int) -> Found:
    pieces = (use.piece(2, "weight"), weighted), (use.piece(3, "bias"), sums)
    return [(piece, vector(piece, _positions(rows, fold))) for piece, rows in pieces if piece is not None]


class Grouped:
    """Group norm of images whose channels lie last, by kernels: what the way back and the rule both need."""

    def __init__(self, pixels: Tensor, groups: int, weight: Tensor, means: Tensor, scales: Tensor) -> None:
        self._pixels, self._groups, self._weight, self._means, self._scales = pixels, groups, weight, means, scales
        self._sums: tuple[Tensor, Tensor] | None = None

    def rows(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias, (n, channels)."""
        alone, products = self._found(_last(gradient).contiguous())
        return products * self._scales, alone

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of the pixels, from that of the output."""
        last, moments = _last(gradient).contiguous(), (self._means, self._scales)
        found = self._found(last)
        made: Tensor = kernels.grouping().back(self._pixels, self._groups, self._weight, moments, last, found)
        return made

    def _found(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if self._sums is None:  # the rule hears the gradient first
            self._sums = kernels.grouping().sums(self._pixels, self._means, gradient)
        return self._sums


class _Through(torch.autograd.Function):
    """Group norm whose weight and bias are constants; `normal` (n, positions, channels) is its output."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, normal: Tensor, grouped: Grouped) -> Tensor:
        ctx.grouped, (n, channels, *sizes) = grouped, inputs.shape
        return normal.view(n, *sizes, channels).movedim(-1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        n, channels, *sizes = gradients[0].shape
        grouped, ctx.grouped = ctx.grouped, None
        return grouped.back(gradients[0]).view(n, *sizes, channels).movedim(-1, 1), None, None


def _last(tensor: Tensor) -> Tensor:
    """(n, positions, channels)."""
    return tensor.movedim(1, -1).flatten(1, -2) if tensor.dim() > 2 else tensor.unsqueeze(1)


def _moments(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over positions of y' and of y' x, a few examples at a time: each product is summed while in cache."""
    n, positions, channels = gradient.shape
    sums, weighted = gradient.new_empty(2, n, channels).unbind(0)
    for start, stop in chunks(n, max(1, _CACHED * torch.get_num_threads() // (positions * channels))):
        part = gradient[start:stop]
        products = torch.mul(part, inputs[start:stop], out=scratch_like("products", part))
        torch.sum(part, 1, out=sums[start:stop])
        torch.sum(products, 1, out=weighted[start:stop])
    return sums, weighted


_CACHED = 1 << 16  # numbers that stay in a core's cache from one operation to the next


def _with_moments(
    inputs: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, tuple[Tensor, Tensor] | Grouped] | None:
    """Group norm, and the mean and the reciprocal deviation of every group."""
    if weight is None or inputs.dtype != weight.dtype or torch.is_autocast_enabled("cpu") or inputs.numel() == 0:
        return None
    if not inputs.is_contiguous() and not (
        inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    ):
        inputs = inputs.contiguous()
    n, channels = inputs.shape[:2]
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()
    if last and bias is not None and channels % groups == 0 and kernels.take(inputs.movedim(1, -1), weight, bias):
        pixels = _last(inputs.detach())
        normal, *moments = kernels.grouping().normalised(pixels, groups, weight, bias, eps)
        grouped = Grouped(pixels, groups, weight, *moments)
        return _Through.apply(inputs, normal, grouped), grouped  # type: ignore[no-untyped-call]
    out, mean, scale = torch.native_group_norm(inputs, weight, bias, n, channels, inputs[0, 0].numel(), groups, eps)
    return out, (mean.detach(), scale.detach())


COMPUTE[functional.group_norm] = _with_moments


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
