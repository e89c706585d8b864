"""Scattering: against convolutions done pixel by pixel, and the properties its theory promises."""

import math

import numpy as np
import pytest
import torch

from terrine.errors import InvalidArgument
from terrine.features.scattering import Scattering, _morlet


def spatial_wavelet(size, sigma, xi, theta, slant):
    """A Morlet wavelet on a torus, from its formula, in the order of the origin first."""
    u, v = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    wave, envelope = np.zeros((size, size), complex), np.zeros((size, size))
    for i in range(-2, 3):
        for k in range(-2, 3):
            a, b = u + i * size, v + k * size
            along, across = a * math.cos(theta) + b * math.sin(theta), -a * math.sin(theta) + b * math.cos(theta)
            gauss = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
            wave += gauss * np.exp(1j * xi * along)
            envelope += gauss
    scale = slant / (2 * math.pi * sigma**2)
    return (wave - wave.sum() / envelope.sum() * envelope) * scale, envelope * scale


def convolved(image, kernel):
    """A circular convolution, sum by sum."""
    size = len(image)
    result = np.zeros((size, size), complex)
    for i in range(size):
        for k in range(size):
            result += image[i, k] * np.roll(kernel, (i, k), (0, 1))
    return result


def test_every_order_equals_the_pixel_by_pixel_transform():
    size, orientations = 8, 4
    image = np.random.default_rng(0).normal(size=(size, size))
    padded = np.pad(image, 4, mode="reflect")
    angle = [(orientations - orientations // 2 - 1 - turn) * math.pi / orientations for turn in range(orientations)]
    banks = [
        [spatial_wavelet(16, 0.8 * 2**j, 0.75 * math.pi / 2**j, theta, 4 / orientations)[0] for theta in angle]
        for j in (0, 1)
    ]
    low = spatial_wavelet(16, 1.6, 0.0, 0.0, 1.0)[1]

    def smooth(signal, every=4):
        return convolved(signal, low).real[::every, ::every][1:3, 1:3]

    first = [np.abs(convolved(padded, kernel)) for kernel in banks[0]]
    expected = [smooth(padded), *(smooth(one) for one in first)]
    coarse_low = np.fft.ifft2(np.fft.fft2(low).reshape(2, 8, 2, 8).mean((0, 2))).real

    def coarse(signal):
        return convolved(signal[::2, ::2], coarse_low).real[::2, ::2][1:3, 1:3]

    expected += [coarse(np.abs(convolved(padded, kernel))) for kernel in banks[1]]
    expected += [coarse(np.abs(convolved(one, kernel))) for one in first for kernel in banks[1]]
    found = Scattering(size, size, orientations=orientations)(torch.tensor(image, dtype=torch.float32)[None, None])[0]
    assert np.allclose(found.numpy(), np.stack(expected), atol=1e-5)


def test_shapes_are_the_published_ones():
    assert Scattering(28, 28)(torch.rand(3, 1, 28, 28)).shape == (3, 81, 7, 7)
    assert Scattering(32, 32)(torch.rand(2, 3, 32, 32)).shape == (2, 243, 8, 8)
    assert Scattering(28, 28)(torch.rand(0, 1, 28, 28)).shape == (0, 81, 7, 7)


def test_wavelets_have_mean_zero_and_the_bank_never_amplifies():
    """Littlewood-Paley: |phi|^2 + 1/2 sum |psi(w)|^2 + |psi(-w)|^2 <= 1, so scattering is non-expansive."""
    bank = torch.stack([_morlet((36, 36), scale, turn, 8) for scale in (0, 1) for turn in range(8)])
    assert float(bank[:, 0, 0].abs().max()) < 1e-12
    mirrored = torch.roll(bank.flip(1, 2), (1, 1), (1, 2))
    total = Scattering(28, 28).low ** 2 + 0.5 * (bank**2 + mirrored**2).sum(0)
    assert float(total.max()) <= 1 + 1e-6
    x, y = torch.randn(2, 8, 1, 28, 28)
    apart = [(Scattering(28, 28)(x) - Scattering(28, 28)(y)).flatten(1).norm(dim=1) * 4, (x - y).flatten(1).norm(dim=1)]
    assert bool((apart[0] <= 1.5 * apart[1]).all())  # 1.5: the mirrored margin repeats pixels


def test_a_shift_moves_the_features_less_than_the_image():
    image = torch.zeros(1, 1, 32, 32)
    image[..., 12:20, 12:20] = torch.rand(8, 8)
    shifted = torch.roll(image, 1, dims=3)
    scattering = Scattering(32, 32)
    before, after = scattering(image), scattering(shifted)
    assert float((after - before).norm() / before.norm()) < 0.5 * float((shifted - image).norm() / image.norm())


def test_a_constant_image_has_only_its_mean():
    features = Scattering(28, 28)(torch.full((1, 1, 28, 28), 3.0))
    assert torch.allclose(features[:, 0], torch.full((1, 7, 7), 3.0), atol=1e-4)
    assert float(features[:, 1:].abs().max()) < 1e-4


def test_images_of_another_size_are_refused():
    with pytest.raises(InvalidArgument, match="28, 28"):
        Scattering(28, 28)(torch.rand(1, 1, 32, 32))
    with pytest.raises(InvalidArgument, match="multiple of 4"):
        Scattering(30, 28)
