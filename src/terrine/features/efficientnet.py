"""EfficientNet-Lite0 without its head: 1,280 public ImageNet features for each image, from the published weights.

Sixteen inverted bottlenecks of expansion, depthwise convolution and projection with ReLU6 [TL19]. Every batch norm is
folded into its convolution with the published statistics,

    gamma (W x - mean) / sqrt(var + 1e-3) + beta  =  W' x + b',

so nothing is left to train or to mix examples. Images are padded at the far edges, as the published network was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from terrine import check
from terrine.errors import InvalidArgument

_STRIDES = {1: 2, 3: 2, 5: 2, 11: 2}
"""The bottlenecks that halve the image; the stem halves it too."""
_BLOCKS = 16


class EfficientNetLite0(nn.Module):
    """Images as bytes (n, 3, any, any) to features (n, 1280), each image's alone; seen at `size` x `size` pixels.

    Guarantee: fixed public weights, so the features of private images cost nothing.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, size: int = 128) -> None:
        super().__init__()
        self.size = check.whole("size", size, at_least=32)
        self.stem = _Folded(weights, "_conv_stem", "_bn0", stride=2)
        self.blocks = nn.Sequential(*(_Bottleneck(weights, place) for place in range(_BLOCKS)))
        self.top = _Folded(weights, "_conv_head", "_bn1")
        self.eval()

    @classmethod
    def read(cls, path: str | Path, *, size: int = 128) -> EfficientNetLite0:
        """The network from the published file `efficientnet-lite0-....pth`.

        Raises:
            InvalidArgument: the file is missing or holds something else.
        """
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
            return cls(weights, size=size)
        except (OSError, KeyError, TypeError, RuntimeError) as error:
            raise InvalidArgument(f"{path}: want the published weights of EfficientNet-Lite0; {error}") from None

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        scaled = (images.float() - 127) / 128  # as the published network was trained
        larger = nn.functional.interpolate(scaled, (self.size, self.size), mode="bicubic", align_corners=False)
        seen = self.blocks(self.stem(larger.contiguous(memory_format=torch.channels_last), bounded=True))
        features: Tensor = self.top(seen, bounded=True).mean(dim=(2, 3))
        return features


class _Folded(nn.Module):
    """A convolution with the batch norm behind it, as one convolution."""

    def __init__(self, weights: Mapping[str, Tensor], convolution: str, norm: str, *, stride: int = 1) -> None:
        super().__init__()
        kernel = weights[f"{convolution}.weight"].double()
        scale = weights[f"{norm}.weight"].double() / (weights[f"{norm}.running_var"].double() + 1e-3).sqrt()
        bias = weights[f"{norm}.bias"].double() - weights[f"{norm}.running_mean"].double() * scale
        folded = (kernel * scale.view(-1, 1, 1, 1)).float().contiguous(memory_format=torch.channels_last)
        self.register_buffer("kernel", folded)
        self.register_buffer("bias", bias.float())
        self.stride, self.groups = stride, len(kernel) if kernel.shape[1] == 1 else 1

    def forward(self, x: Tensor, *, bounded: bool = False) -> Tensor:
        kernel: Tensor = self.get_buffer("kernel")
        margins = []
        for length in (x.shape[3], x.shape[2]):
            missing = max((-(-length // self.stride) - 1) * self.stride + kernel.shape[-1] - length, 0)
            margins += [missing // 2, missing - missing // 2]
        inside = (margins[1], margins[1]) if margins[0] == margins[1] == margins[2] == margins[3] else None
        padded = x if inside else nn.functional.pad(x, margins)
        found = nn.functional.conv2d(
            padded, kernel, self.get_buffer("bias"), self.stride, inside or (0, 0), groups=self.groups
        )
        return found.clamp_(0, 6) if bounded else found


class _Bottleneck(nn.Module):
    def __init__(self, weights: Mapping[str, Tensor], place: int) -> None:
        super().__init__()
        self.stride, name = _STRIDES.get(place, 1), f"_blocks.{place}"
        self.wider = _Folded(weights, f"{name}._expand_conv", f"{name}._bn0") if place else None
        self.across = _Folded(weights, f"{name}._depthwise_conv", f"{name}._bn1", stride=self.stride)
        self.narrower = _Folded(weights, f"{name}._project_conv", f"{name}._bn2")

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.wider is None else self.wider(x, bounded=True)
        narrow: Tensor = self.narrower(self.across(wide, bounded=True))
        return narrow + x if narrow.shape == x.shape and self.stride == 1 else narrow
