"""The features that the CIFAR-10 benchmark adds up: those of an image and of its mirror image."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from terrine.features.architectures import scatter_features
from tests.benchmarks import load


@pytest.fixture(scope="module")
def features() -> ModuleType:
    return load("features")


def _smooth_images() -> Tensor:
    noise = torch.rand(4, 3, 11, 11, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.interpolate(noise, size=(32, 32), mode="bicubic", align_corners=False)


def _error(found: Tensor, wanted: Tensor) -> float:
    oriented = torch.arange(wanted.shape[1]) % 81 > 0
    return float((found - wanted)[:, oriented].norm() / wanted[:, oriented].norm())


def test_the_other_half_is_what_scattering_says_of_the_mirrored_image(features: ModuleType) -> None:
    images = _smooth_images()
    maps = scatter_features(images)
    wanted = scatter_features(images.flip(3))[..., 1:5]
    found = (features.with_mirrored(maps) - maps[..., :5])[..., 1:]
    unturned = maps[..., [7, 6, 5, 4]]
    assert _error(found, wanted) < 0.4 * _error(unturned, wanted)


def test_every_feature_has_one_mirror_image_and_is_its(features: ModuleType) -> None:
    places = features._mirrored_channels(243)
    assert torch.equal(places[places], torch.arange(243))
    assert torch.equal(places // 81, torch.arange(243) // 81)


def test_the_left_part_with_its_middle_is_kept(features: ModuleType) -> None:
    assert features.with_mirrored(torch.rand(2, 243, 8, 8)).shape == (2, 243, 8, 5)
