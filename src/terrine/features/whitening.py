"""Features that suit noise: centred and partly whitened by two billed releases, blurred by a fixed kernel.

For maps of features x (channels x places), each example scaled to norm at most 1:

    m = (sum x + N(0, mean_noise^2 I)) / n                    the mean, one Gaussian release of sensitivity 1
    c = x - m, scaled to norm 1
    M = sum c c^T + symmetric noise of deviation `noise`      the channels' second moments; |c c^T| <= |c|^2 = 1
    x -> unit length of (M/tr M + floor I)^(-power/2) (x - m), its `keep` leading channels, blurred over places

Why: the noise of DP-SGD is the same in every direction of weights, so it costs |x|^2. Most of |x|^2 is the mean, which
tells no class from another [SSM23], and what remains lies in few channels; weights of neighbouring places agree. All
three maps spend the norm where the classes differ. The floor is the length of the noise in M, at least 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from terrine import check
from terrine.common.keys import Key, Purpose
from terrine.common.people import People
from terrine.events import Composed, Event, Gaussian, Neighbours, Reproducible, Unit
from terrine.features.moments import protected_moments

_AT_ONCE = 4096


@dataclass(frozen=True)
class Whitening:
    """A released mean and map, and what they cost; give `event` to `Plan(preparation=...)`."""

    mean: Tensor
    channels: Tensor
    blur: float
    event: Event

    def __call__(self, features: Tensor) -> Tensor:
        """(n, channels, height, width) to (n, keep x height x width), each example of length 1."""
        kept = self.channels.shape[0] * math.prod(features.shape[2:])
        return self.into(features.new_empty(len(features), kept), features)

    def into(self, made: Tensor, features: Tensor) -> Tensor:
        """The same, written to `made`, which may be where the features lie."""
        for to, part in zip(torch.split(made, _AT_ONCE), torch.split(features, _AT_ONCE), strict=True):
            to.copy_(self._mapped(part))
        return made

    def _mapped(self, features: Tensor) -> Tensor:
        centred = bounded(features) - self.mean
        kept = torch.einsum("kc,nchw->nkhw", self.channels, centred)
        if self.blur > 0:
            kernel = torch.tensor([self.blur, 1.0, self.blur])
            kernel = torch.outer(kernel, kernel).expand(kept.shape[1], 1, 3, 3)
            kept = nn.functional.conv2d(kept, kernel.contiguous(), padding=1, groups=kept.shape[1])
        return _unit(kept).flatten(1)


def private_whitening(
    features: Tensor,
    *,
    mean_noise: float = 40.0,
    noise: float = 20.0,
    power: float = 0.7,
    keep: int | None = None,
    blur: float = 0.0,
    without: Tensor | None = None,
    people: People | None = None,
    rows_per_person: int = 10,
    seed: int | None = None,
) -> Whitening:
    """Mean and channel moments of (n, channels, height, width) features, released with Gaussian noise.

    Examples at the places `without` count as rows but add nothing to either sum. With `people`, each adds the mean over
    at most `rows_per_person` of its rows, and the event's unit is a person.

    Guarantee: costs `Gaussian(mean_noise)` and, where power > 0, `Gaussian(noise)`, under add/remove neighbours:
    replacing an example moves the mean's sum by up to 2, so a plan under other neighbours refuses the event. `seed` is
    for tests and stamps it.
    """
    channels = features.shape[1]
    kept = channels if keep is None else check.whole("keep", keep)
    if kept > channels:
        raise check.refuse("keep", keep, f"at most the {channels} channels")
    power, blur = check.not_negative("power", power), check.not_negative("blur", blur)
    key = Key.fresh() if seed is None else Key.seeded(seed)
    unit = None if people is None else Unit.PERSON
    event = whitening_event(mean_noise=mean_noise, noise=noise, power=power, unit=unit, seed=seed)
    shares = torch.ones(len(features))
    if people is not None:
        shares = torch.from_numpy(people.shares(check.whole("rows_per_person", rows_per_person), key))
    if without is not None:
        shares[without] = 0.0
    mean = _mean(features, shares, key, mean_noise) / max(len(features) if people is None else len(people), 1)
    mapped = torch.eye(channels)
    if power > 0:
        mapped = _whitened(_moments(features, shares, mean, key, noise), noise, power, kept)
    return Whitening(mean, mapped, blur, event)


def whitening_event(
    *, mean_noise: float, noise: float, power: float, unit: Unit | None = None, seed: int | None = None
) -> Event:
    """What `private_whitening` costs, known before it is done."""
    mean, moments = (Gaussian(noise=one, neighbours=Neighbours.ADD_REMOVE, unit=unit) for one in (mean_noise, noise))
    whole = Composed([mean, moments]) if power > 0 else mean
    return whole if seed is None else Reproducible(whole)


def bounded(features: Tensor) -> Tensor:
    """Each example scaled to norm at most 1; one that is not finite becomes zero and so adds nothing."""
    flat = features.float().flatten(1)
    flat = torch.where(flat.isfinite().all(dim=1, keepdim=True), flat, 0.0)
    scaled: Tensor = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1.0)
    return scaled.view(features.shape)


def _unit(features: Tensor) -> Tensor:
    return nn.functional.normalize(features.flatten(1), dim=1).view(features.shape)


def _mean(features: Tensor, shares: Tensor, key: Key, noise: float) -> Tensor:
    """The noisy sum of the features, each by its share: at most 1 in all for a unit."""
    total = torch.zeros(features.shape[1:], dtype=torch.float64)
    for part, share in _parts(features, shares):
        total += (share * bounded(part)).sum(dim=0, dtype=torch.float64)
    released = total.float()
    key.draw(Purpose.PROJECTION, 1).protect(released, noise)
    return released


def _moments(features: Tensor, shares: Tensor, mean: Tensor, key: Key, noise: float) -> Tensor:
    width = features.shape[1]
    total = torch.zeros(width, width, dtype=torch.float64)
    for part, share in _parts(features, shares):
        centred = (share.sqrt() * _unit(bounded(part) - mean)).transpose(0, 1).flatten(1)
        total += (centred @ centred.T).double()
    return protected_moments(total, key.draw(Purpose.PROJECTION, 2), noise)


def _parts(features: Tensor, shares: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The examples a few thousand at a time, each with what it counts."""
    return zip(torch.split(features, _AT_ONCE), torch.split(shares.view(-1, 1, 1, 1), _AT_ONCE), strict=True)


def _whitened(moments: Tensor, noise: float, power: float, keep: int) -> Tensor:
    """The map to the leading channels, from the released moments alone."""
    trace = float(torch.trace(moments).clamp(min=1.0))
    values, vectors = torch.linalg.eigh(moments / trace)
    floor = max(noise * math.sqrt(2 * len(values)) / trace, 1e-3)
    lengths = (values.clamp(min=0.0) + floor) ** (-power / 2)
    leading: Tensor = (vectors * lengths)[:, -keep:].flip(1).T.float().contiguous()
    return leading
