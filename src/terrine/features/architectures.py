"""Networks that learn well under DP-SGD, and the fixed features in front of them.

    mlp                 one hidden layer on 60 private principal components        [ACG16]
    tempered_cnn        small CNNs with bounded activations                        [PTS21]
    WaveletCNN          a CNN whose first filters begin as wavelets, all trained
    scatter_linear      a linear model or small CNN on scattering features         [TB21]
    resnet              residual network with group norm: nothing mixes examples
    extract             features of a pretrained network, for transfer

A bounded activation keeps gradients short, so that clipping bends them less; fixed and pretrained features leave few
parameters for the noise to hide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terrine import check
from terrine.errors import InvalidArgument
from terrine.features.scattering import Scattering, wavelets


class TemperedSigmoid(nn.Module):
    """scale sigmoid(temperature x) - offset; the default is tanh. Bounded by max(offset, scale - offset)."""

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * torch.sigmoid(self.temperature * x) - self.offset
        return result


def mlp(inputs: int = 60, hidden: int = 1000, classes: int = 10) -> nn.Sequential:
    """Abadi's network: one layer of rectified units, on private principal components (60) or on pixels (784)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def tempered_cnn(
    channels: int = 1, size: int = 28, classes: int = 10, activation: nn.Module | None = None
) -> nn.Sequential:
    """The published CNN for 28 x 28 grey images, or the one of eight convolutions for 32 x 32 colour images."""
    bounded = activation or nn.Tanh()
    if (channels, size) == (1, 28):
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), bounded, nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2), bounded, nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 32), bounded, nn.Linear(32, classes),
        )  # fmt: skip
    if (channels, size) != (3, 32):
        raise InvalidArgument(f"images of {channels} x {size} x {size}: want 1 x 28 x 28 or 3 x 32 x 32")
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), bounded, nn.Conv2d(after, after, 3, padding=1), bounded]
        layers.append(nn.AvgPool2d(2))
    layers += [nn.Conv2d(128, 256, 3, padding=1), bounded, nn.Conv2d(256, classes, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class WaveletCNN(nn.Module):
    """A CNN for square images, trained end to end from a start that already sees edges.

        a = norm |x * psi|                  pairs of 7 x 7 filters, every other pixel
        b = tanh(a * w)                     `hidden` filters of 3 x 3, every other place
        logits = V (norm pool a, norm b)

    psi begins as Morlet wavelets, their real and imaginary parts, w at random and V at zero: nothing comes from data,
    so nothing is billed, and DP-SGD trains every weight. The first steps find a linear model on |x * psi|, from which
    both convolutions learn; noise would take long to find such filters.
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 28,
        classes: int = 10,
        *,
        scales: int = 2,
        orientations: int = 8,
        hidden: int = 32,
    ) -> None:
        super().__init__()
        if check.whole("size", size) % 4:
            raise check.refuse("size", size, "a multiple of 4")
        pairs = check.whole("scales", scales) * check.whole("orientations", orientations)
        self.waves = nn.Conv2d(channels, 2 * pairs, 7, stride=2, padding=3)
        self.second = nn.Conv2d(pairs, hidden, 3, stride=2, padding=1)
        self.pool, self.whole = nn.AvgPool2d(2), nn.GroupNorm(1, pairs, affine=False)
        self.groups = nn.GroupNorm(math.gcd(8, hidden), hidden, affine=False)
        self.head = nn.Linear((pairs + hidden) * (size // 4) ** 2, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.waves.weight.data.copy_(wavelets(7, scales=scales, orientations=orientations) / math.sqrt(channels))
        self.waves.bias = nn.Parameter(torch.zeros(2 * pairs))

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = self.waves(x).chunk(2, dim=1)
        first = self.whole((real * real + imaginary * imaginary + 1e-4).sqrt())  # 1e-4: a slope where nothing is
        second = self.groups(torch.tanh(self.second(first)))
        logits: Tensor = self.head(torch.cat([self.whole(self.pool(first)), second], dim=1).flatten(1))
        return logits


def scatter_features(images: Tensor, *, scales: int = 2) -> Tensor:
    """Scattering features of (n, channels, height, width) images, each image's alone: no privacy is spent."""
    features: Tensor = Scattering(images.shape[2], images.shape[3], scales=scales).to(images.device)(images)
    return features


def scatter_linear(channels: int = 1, size: int = 28, classes: int = 10, *, groups: int = 27) -> nn.Sequential:
    """A linear model on scattering features, normalised by groups within each example."""
    features, side = 81 * channels, size // 4
    norm = nn.GroupNorm(groups, features, affine=False)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(features * side * side, classes))


def scatter_cnn(channels: int = 1, size: int = 28, classes: int = 10, *, groups: int = 27) -> nn.Sequential:
    """A small CNN with bounded activations on scattering features."""
    features, side = 81 * channels, size // 4
    return nn.Sequential(
        nn.GroupNorm(groups, features, affine=False),
        nn.Conv2d(features, 64 if channels > 1 else 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(64 if channels > 1 else 16, 64 if channels > 1 else 32, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear((64 if channels > 1 else 32) * ((side + 1) // 2) ** 2, classes),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions with group norm, added to what came in."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(groups, after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(groups, after),
        )  # fmt: skip
        short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(groups, after))
        self.short = nn.Identity() if before == after and stride == 1 else short

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet(
    channels: int = 3,
    classes: int = 10,
    *,
    widths: Sequence[int] = (64, 128, 256, 512),
    blocks: int = 2,
    groups: int = 16,
) -> nn.Sequential:
    """A residual network with group norm; the default is ResNet-18 for 32 x 32 images."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False),
        nn.GroupNorm(groups, widths[0]),
        nn.ReLU(),
    ]
    before = widths[0]
    for place, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(before, width, 2 if place and not block else 1, groups))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


@torch.no_grad()
def extract(network: nn.Module, inputs: Tensor, *, at_once: int = 256, unit_length: bool = True) -> Tensor:
    """What a pretrained network, given with its weights and without its head, says of each example alone.

    The network must not have seen the private data; then its features cost nothing. With `unit_length` each
    example's features are scaled to norm 1, which makes one learning rate and clipping bound fit most networks.
    """
    training = network.training
    network.eval()
    parts = [network(part).flatten(1) for part in torch.split(inputs, check.whole("at_once", at_once))]
    network.train(training)
    features = torch.cat(parts) if parts else torch.zeros(0, 0)
    return nn.functional.normalize(features, dim=1) if unit_length else features
