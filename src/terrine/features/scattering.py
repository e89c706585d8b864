"""Scattering features: two layers of Morlet wavelets and moduli, fixed in advance, so they cost no privacy.

For scales 2^j, j < J, and L orientations, with a Gaussian low pass phi of scale 2^J:

    S0 = x * phi,   S1 = |x * psi_1| * phi,   S2 = ||x * psi_1| * psi_2| * phi     (j_2 > j_1)

each sampled every 2^J pixels [Mal12], [BM13]. J = 2 and L = 8 give 81 channels per image channel: linear models on
these features beat deep networks under DP-SGD at small epsilon [TB21].

A Morlet wavelet is a plane wave under an elongated Gaussian, made to have mean zero:

    psi(u) = (e^(i xi u_1) - beta) exp(-(u_1^2 + slant^2 u_2^2) / (2 sigma^2)) slant / (2 pi sigma^2)

with sigma = 0.8 2^j, xi = (3 pi/4) 2^-j, slant = 4/L, u turned by theta. Convolutions run in the Fourier domain on
images mirrored at their edges; a product is folded before it is transformed back, which samples it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from terrine import check
from terrine.errors import InvalidArgument


class Scattering(nn.Module):
    """(n, channels, height, width) to (n, channels x features, height / 2^scales, width / 2^scales)."""

    def __init__(self, height: int, width: int, *, scales: int = 2, orientations: int = 8) -> None:
        super().__init__()
        self.scales, self.orientations = check.whole("scales", scales), check.whole("orientations", orientations)
        block = 2**self.scales
        for name, size in (("height", height), ("width", width)):
            if check.whole(name, size) % block or size <= block:
                raise check.refuse(name, size, f"a multiple of {block} above {block}")
        self._size = (height, width)
        self._padded = tuple(((size + block) // block + 1) * block for size in (height, width))
        low = _spectrum(_gabor(self._padded, 0.8 * 2 ** (scales - 1), 0, 0, 1))
        for at in range(self.scales):
            self.register_buffer(f"low{at}", self._smoothing(_folded(low, 2**at), at), persistent=False)
            for scale in range(at, self.scales) if at == 0 else range(at + 1, self.scales):
                turns = [_morlet(self._padded, scale, turn, orientations) for turn in range(orientations)]
                bank = _aliases(_folded(torch.stack(turns), 2**at), 2 ** (scale - at))
                both = bank.unsqueeze(-1).expand(*bank.shape, 2).flatten(-2).contiguous()  # for real and imaginary
                self.register_buffer(f"wavelets{at}{scale}", both.float(), persistent=False)
        self.low = low

    @property
    def features(self) -> int:
        """Channels out for one channel in."""
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.orientations * self.scales + self.orientations**2 * pairs

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or tuple(x.shape[2:]) != self._size:
            raise InvalidArgument(
                f"images of shape {tuple(x.shape)}: want (n, channels, {self._size[0]}, {self._size[1]})"
            )
        if not len(x):
            block = 2**self.scales
            return x.new_zeros(0, x.shape[1] * self.features, *(size // block for size in self._size))
        return torch.cat([self._scattered(part) for part in torch.split(x, 16)])

    def _scattered(self, x: Tensor) -> Tensor:
        count, channels = x.shape[:2]
        image = self._mirrored(x.flatten(0, 1).float()).unsqueeze(1)
        orders: list[list[Tensor]] = [[self._smooth(image, 0)], [], []]
        spectrum = torch.fft.fft2(image)
        for scale in range(self.scales):
            first = self._waves(spectrum, 0, scale)
            orders[1].append(self._smooth(first, scale))
            if scale + 1 < self.scales:
                again = torch.fft.fft2(first)
                orders[2] += [
                    self._smooth(self._waves(again, scale, later), later) for later in range(scale + 1, self.scales)
                ]
        features = torch.cat([one for order in orders for one in order], dim=1)
        return features.reshape(count, channels * self.features, *(size // 2**self.scales for size in self._size))

    def _waves(self, spectrum: Tensor, at: int, scale: int) -> Tensor:
        """|signal * psi| for every orientation, sampled at `scale`; the signal is sampled at `at`."""
        every = 2 ** (scale - at)
        height, width = (spectrum.shape[-2] // every, spectrum.shape[-1] // every)
        bank = getattr(self, f"wavelets{at}{scale}")
        copies = torch.view_as_real(_aliases(spectrum, every)).flatten(-2).unsqueeze(2)
        filtered = copies[:, :, :, 0] * bank[:, 0]
        for copy in range(1, every * every):
            filtered.addcmul_(copies[:, :, :, copy], bank[:, copy])
        wave = torch.view_as_complex(filtered.view(*filtered.shape[:3], height, width, 2).flatten(1, 2))
        return _modulus(torch.fft.ifft2(wave))

    def _smooth(self, signal: Tensor, at: int) -> Tensor:
        """The signal under the low pass, sampled every 2^scales pixels, without the mirrored margin."""
        smooth: Tensor = signal.flatten(2) @ getattr(self, f"low{at}")
        return smooth

    def _smoothing(self, low: Tensor, at: int) -> Tensor:
        """Low pass, sampling and cropping as one matrix: it is small, and one product is faster than two transforms."""
        pixels = torch.eye(low.numel(), dtype=torch.float64).view(-1, *low.shape)
        smooth = torch.fft.ifft2(torch.fft.fft2(pixels) * low).real[
            ..., :: 2 ** (self.scales - at), :: 2 ** (self.scales - at)
        ]
        height, width = (size // 2**self.scales for size in self._size)
        cropped: Tensor = smooth[:, 1 : 1 + height, 1 : 1 + width].flatten(1).float()
        return cropped

    def _mirrored(self, x: Tensor) -> Tensor:
        before = 2**self.scales
        after = [padded - size - before for padded, size in zip(self._padded, self._size, strict=True)]
        return nn.functional.pad(x.unsqueeze(1), (before, after[1], before, after[0]), mode="reflect").squeeze(1)


def wavelets(size: int, *, scales: int = 2, orientations: int = 8) -> Tensor:
    """Morlet wavelets as (2 x scales x orientations, 1, size, size) filters of mean 0 and norm 1, real parts first."""
    places = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    down, right = torch.meshgrid(places, places, indexing="ij")
    turns = torch.arange(orientations, dtype=torch.float64).view(-1, 1, 1) * math.pi / orientations
    wide = 2.0 ** torch.arange(scales, dtype=torch.float64).view(-1, 1, 1, 1)
    along = (right * turns.cos() + down * turns.sin()) / wide
    across = (down * turns.cos() - right * turns.sin()) / wide
    envelope = torch.exp(-(along**2 + (4 / orientations * across) ** 2) / (2 * 0.8**2))
    waves = torch.stack([(0.75 * math.pi * along).cos(), (0.75 * math.pi * along).sin()]) * envelope
    waves -= waves.sum(dim=(-2, -1), keepdim=True) / envelope.sum(dim=(-2, -1), keepdim=True) * envelope
    waves /= torch.linalg.vector_norm(waves, dim=(-2, -1), keepdim=True)
    return waves.flatten(0, 2).unsqueeze(1).float()


def _modulus(wave: Tensor) -> Tensor:
    """sqrt(a^2 + b^2), four times as fast as `abs`, which guards against overflows that pixels cannot cause."""
    squares = torch.view_as_real(wave).square_()
    modulus: Tensor = (squares[..., 0] + squares[..., 1]).sqrt_()
    return modulus


def _folded(spectrum: Tensor, every: int) -> Tensor:
    """The spectrum of a signal sampled every so many pixels: the mean of its shifted copies."""
    if every == 1:
        return spectrum
    height, width = spectrum.shape[-2] // every, spectrum.shape[-1] // every
    return spectrum.reshape(*spectrum.shape[:-2], every, height, every, width).mean(dim=(-4, -2))


def _aliases(spectrum: Tensor, every: int) -> Tensor:
    """The copies that sampling adds up, each as one row, so that their weighted sum is the folded product."""
    height, width = spectrum.shape[-2] // every, spectrum.shape[-1] // every
    split = spectrum.reshape(*spectrum.shape[:-2], every, height, every, width).transpose(-3, -2)
    weight = 1 / every**2 if not spectrum.is_complex() else 1  # the mean's divisor lives in the filters
    return split.reshape(*spectrum.shape[:-2], every**2, height * width) * weight


def _morlet(shape: tuple[int, ...], scale: int, turn: int, orientations: int) -> Tensor:
    sigma, xi, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / orientations
    theta = (int(orientations - orientations / 2 - 1) - turn) * math.pi / orientations
    wave = _gabor(shape, sigma, theta, xi, slant)
    envelope = _gabor(shape, sigma, theta, 0, slant)
    return _spectrum(wave - wave.sum() / envelope.sum() * envelope)


def _gabor(shape: tuple[int, ...], sigma: float, theta: float, xi: float, slant: float) -> Tensor:
    """A plane wave under a Gaussian, on a torus: the copies that reach over the edge are added."""
    turn = torch.tensor([[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]], dtype=torch.float64)
    curve = turn @ torch.diag(torch.tensor([1.0, slant**2], dtype=torch.float64)) @ turn.T / (2 * sigma**2)
    total = torch.zeros(shape, dtype=torch.complex128)
    for row in range(-2, 3):
        for column in range(-2, 3):
            u = torch.arange(shape[0], dtype=torch.float64).view(-1, 1) + row * shape[0]
            v = torch.arange(shape[1], dtype=torch.float64).view(1, -1) + column * shape[1]
            decay = curve[0, 0] * u**2 + (curve[0, 1] + curve[1, 0]) * u * v + curve[1, 1] * v**2
            total += torch.exp(torch.complex(-decay, xi * (u * math.cos(theta) + v * math.sin(theta))))
    return total * slant / (2 * math.pi * sigma**2)


def _spectrum(filter_: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft2(filter_).real  # symmetric about the origin, so nothing imaginary is lost
    return spectrum
