"""EfficientNet-Lite0 with folded batch norms, against the same layers written out, on random weights of its shapes."""

import pytest
import torch
from torch import nn

from terrine.errors import InvalidArgument
from terrine.features.efficientnet import _BLOCKS, EfficientNetLite0

OUT = (16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320)
KERNELS = (3, 3, 3, 5, 5, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 3)


def weights():
    generator, held = torch.Generator().manual_seed(0), {}

    def layer(convolution, norm, after, before, kernel):
        held[f"{convolution}.weight"] = torch.randn(after, before, kernel, kernel, generator=generator) / (
            kernel * before**0.5
        )
        held[f"{norm}.weight"] = torch.rand(after, generator=generator) + 0.5
        held[f"{norm}.bias"] = torch.randn(after, generator=generator) / 10
        held[f"{norm}.running_mean"] = torch.randn(after, generator=generator) / 10
        held[f"{norm}.running_var"] = torch.rand(after, generator=generator) + 0.5

    layer("_conv_stem", "_bn0", 32, 3, 3)
    before = 32
    for place in range(_BLOCKS):
        wide, name = before * 6 if place else before, f"_blocks.{place}"
        if place:
            layer(f"{name}._expand_conv", f"{name}._bn0", wide, before, 1)
        layer(f"{name}._depthwise_conv", f"{name}._bn1", wide, 1, KERNELS[place])
        layer(f"{name}._project_conv", f"{name}._bn2", OUT[place], wide, 1)
        before = OUT[place]
    layer("_conv_head", "_bn1", 1280, 320, 1)
    return held


def written_out(held, images):
    """Convolution, then batch norm, then ReLU6, one after the other; margins added by hand."""

    def layer(x, convolution, norm, stride=1, bounded=True):
        kernel = held[f"{convolution}.weight"]
        size, length = kernel.shape[-1], x.shape[-1]
        missing = max((-(-length // stride) - 1) * stride + size - length, 0)
        before = missing // 2
        x = nn.functional.pad(x, (before, missing - before, before, missing - before))
        x = nn.functional.conv2d(x, kernel, stride=stride, groups=len(kernel) if kernel.shape[1] == 1 else 1)
        x = nn.functional.batch_norm(
            x, held[f"{norm}.running_mean"], held[f"{norm}.running_var"], held[f"{norm}.weight"],
            held[f"{norm}.bias"], eps=1e-3,
        )  # fmt: skip
        return x.clamp(0, 6) if bounded else x

    x = layer((images.float() - 127) / 128, "_conv_stem", "_bn0", 2)
    for place in range(_BLOCKS):
        name, start = f"_blocks.{place}", x
        if place:
            x = layer(x, f"{name}._expand_conv", f"{name}._bn0")
        x = layer(x, f"{name}._depthwise_conv", f"{name}._bn1", 2 if place in (1, 3, 5, 11) else 1)
        x = layer(x, f"{name}._project_conv", f"{name}._bn2", bounded=False)
        x = x + start if x.shape == start.shape else x
    return layer(x, "_conv_head", "_bn1").mean((2, 3))


def test_folded_norms_change_nothing():
    held, images = weights(), torch.randint(0, 256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(1))
    found = EfficientNetLite0(held, size=64)(images)
    assert found.shape == (2, 1280)
    assert torch.allclose(found, written_out(held, images), rtol=1e-3, atol=1e-4)


def test_images_are_seen_one_by_one_and_nothing_is_left_to_train():
    network, images = EfficientNetLite0(weights(), size=64), torch.randint(0, 256, (3, 3, 32, 32))
    assert torch.allclose(network(images)[:1], network(images[:1]), rtol=1e-3, atol=1e-4)
    assert not list(network.parameters())


def test_another_file_is_refused_in_one_line(tmp_path):
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    for name in ("other.pth", "missing.pth"):
        with pytest.raises(InvalidArgument, match="want the published weights") as raised:
            EfficientNetLite0.read(tmp_path / name)
        assert "\n" not in str(raised.value)
