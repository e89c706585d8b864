"""How a round's contributions are added up, and who adds the noise.

Central            a trusted server adds Gaussian noise once
Skellam            every client adds a share of Skellam noise to whole numbers; nobody sees a contribution [AKL21]
DiscreteGaussian   the same with discrete Gaussians [KLS21]

A round has `per_round` noise givers. Shares are sized for the fewest of them that may be left, `survivors`, less those
who may tell others what they added, `colluding`: so the noise on an opened sum is never less than what was billed.
Whole numbers: one contribution, scaled, rotated and rounded, has at most the l2 norm `reach`, in grid steps; it follows
from the bits of the sum's entries such that they seldom wrap around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine import check, events
from terrine.errors import InvalidArgument
from terrine.events import Event, Unit
from terrine.mechanisms import lattice, poisson_noise
from terrine.rng import Source

Integers = NDArray[np.int64]

_SIGMAS = 6.0
"""How many deviations of the noise the range of an entry holds on either side."""
_SPREAD = 5.0
"""After the rotation an entry of a sum of norm S in d dimensions is below this times S / sqrt(d), with few exceptions.
"""
_LEAST_REACH = 4.0


@dataclass(frozen=True, kw_only=True)
class Central:
    """The server is trusted with contributions, and adds Gaussian noise."""

    def check(self, per_round: int) -> None:
        """Any number of noise givers in a round will do."""

    def event(self, noise: float, per_round: int, dimension: int | None) -> Event:  # noqa: ARG002
        """What opening one sum costs a client who took part, at noise / sensitivity `noise`."""
        return events.Gaussian(noise=noise, unit=Unit.CLIENT)


@dataclass(frozen=True, kw_only=True)
class _Shared:
    bits: int = 20
    survivors: int
    colluding: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check.whole("bits", self.bits, at_least=6))
        object.__setattr__(self, "survivors", check.whole("survivors", self.survivors, at_least=2))
        object.__setattr__(self, "colluding", check.whole("colluding", self.colluding, at_least=0))
        if self.bits > 32:
            raise check.refuse("bits", self.bits, "at most 32")
        if self.colluding > self.survivors - 2:
            hint = "two honest survivors or more, or the sum would show one of them"
            raise check.refuse("colluding", self.colluding, f"at most survivors - 2 = {self.survivors - 2}", hint)

    @property
    def modulus(self) -> int:
        """Entries of a sum are known modulo this."""
        return 1 << self.bits

    @property
    def honest(self) -> int:
        """How many shares of noise are sure to be there, and secret."""
        return self.survivors - self.colluding

    def check(self, per_round: int) -> None:
        """Survivors are counted among the noise givers of a round."""
        if self.survivors > per_round:
            raise check.refuse("survivors", self.survivors, f"at most per_round={per_round}")

    def reach(self, noise: float, per_round: int, dimension: int | None) -> float:
        """The largest l2 norm, in grid steps, of one contribution such that sums seldom wrap around."""
        drawn = per_round + 4 * math.sqrt(per_round)
        signal = drawn * (1.0 if dimension is None else min(1.0, _SPREAD / math.sqrt(dimension)))
        spread = signal + _SIGMAS * noise * math.sqrt(per_round / self.honest)
        found = math.floor((self.modulus // 2 - 1) / spread)
        if found < _LEAST_REACH:
            raise InvalidArgument(
                f"bits={self.bits}: a contribution would have {max(found, 0)} grid steps; want more bits, "
                "or fewer clients per round"
            )
        return float(found)


@dataclass(frozen=True, kw_only=True)
class Skellam(_Shared):
    """Skellam noise in shares: whole numbers, and closed under sums."""

    def event(self, noise: float, per_round: int, dimension: int | None) -> Event:
        reach = self.reach(noise, per_round, dimension)
        return events.Skellam(noise=noise, sensitivity=reach, unit=Unit.CLIENT)

    def share(self, count: int, deviation: float, rng: Source) -> Integers:
        """One client's noise, where `deviation` is that of all that are billed."""
        return poisson_noise.skellam(count, deviation**2 / self.honest, rng)

    def total(self, count: int, deviation: float, givers: int, rng: Source) -> Integers:
        """The noise of `givers` clients at once: the same distribution, for simulations."""
        return poisson_noise.skellam(count, deviation**2 / self.honest * givers, rng)


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(_Shared):
    """Discrete Gaussian noise in shares: whole numbers, and nearly closed under sums."""

    def event(self, noise: float, per_round: int, dimension: int | None) -> Event:
        reach = self.reach(noise, per_round, dimension)
        return events.SummedDiscreteGaussian(noise=noise, sensitivity=reach, shares=self.honest, unit=Unit.CLIENT)

    def share(self, count: int, deviation: float, rng: Source) -> Integers:
        """One client's noise, where `deviation` is that of all that are billed."""
        scale = deviation / math.sqrt(self.honest) * (1 + 2.0**-50)
        return lattice.noise(lattice.Shape.GAUSSIAN, scale).sample(count, rng)

    def total(self, count: int, deviation: float, givers: int, rng: Source) -> Integers:
        """The noise of `givers` clients at once: their shares, added up."""
        found = self.share(count, deviation, rng)
        for _ in range(givers - 1):
            found += self.share(count, deviation, rng)
        return found
