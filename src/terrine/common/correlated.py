"""Noise that takes itself back: banded factorisations of what an optimizer adds up (DP-FTRL, DP-BandMF).

An optimizer's parameters after t steps are a fixed linear sum of the gradients it was given: prefix sums for plain
SGD, A g in general. A run of T steps releases, instead of g + z with independent noise,

    x = g + C^-1 z,   z independent N(0, (noise reach bound)^2),   C = Toeplitz(c_0 = 1, c_1, ..., c_b-1) / norm(c),

so that the parameters carry the noise A C^-1 z, part of which every later step takes back.

What it costs. C x = C g + z is a Gaussian release of C g, from which x follows. One example moves row t of g by at most
its bound, at the steps t that it takes part in. If those are at least b steps apart, the columns t of C have no row in
common, whatever the signs of c: what k such steps move has norm at most sqrt(k) bound, because every column has norm at
most 1 (the last b - 1 are cut off, so they are shorter). Gradients may depend on all that was released before: C is
lower triangular, and for Gaussian noise the adaptive release costs what the fixed one does   [DMR22].

    fixed order      an example takes part once an epoch: k epochs are one Gaussian of noise / sqrt(k)
    cyclic Poisson   each example is in one of b groups, step t draws from group t mod b: between two of its turns
                     nothing depends on it, so a run is ceil(T / b) sampled Gaussians   [CGM23]

Coefficients are public: they follow from the number of steps, the bands and the workload.

The noise is made by forward substitution: y_t = norm(c) z_t - c_1 y_{t-1} - ... - c_{b-1} y_{t-b+1}, c_0 = 1. A run
that goes on after a crash begins the substitution anew, with fresh z: that is the release of a C with two blocks on its
diagonal, whose columns are as short and as far apart, so it costs the same, and no noise is ever written to disk.
Rounding does not pile up: errors of one step in float32 are as if z_t had been off by some 2^-24 of the vectors it is
made of, however many steps there are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter
from torch import Tensor

from terrine import check
from terrine.common.keys import Key, Purpose, grid_of
from terrine.common.normal_values import BLOCK, LARGE
from terrine.errors import InvalidArgument, OutOfOrder

Floats = NDArray[np.float64]
Objective = Literal["mean", "max"]

_DIGITS = 6
"""Decimals that optimised coefficients are rounded to, so that they do not hang on a processor's last bits."""
_LARGEST = 100.0
"""The most that noise may grow to from one step to another, in coefficients of C^-1."""


@dataclass(frozen=True)
class Banded:
    """Noise correlated by a banded lower triangular Toeplitz matrix C; a plan settles its coefficients.

    `bands` is the width b of C: an example may take part at most every b-th step, and the last b - 1 noise vectors are
    kept. One band is independent noise. The coefficients minimise the "mean" (over the steps) or the "max" squared
    error of what `torch.optim.SGD` makes of the gradients with `momentum` and `weight_decay`, the latter times the
    learning rate: the share of a parameter that a step takes away.

    Guarantee: whatever the coefficients, `sensitivity` is not below the norm of any column of C.
    """

    bands: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    objective: Objective = "mean"
    coefficients: tuple[float, ...] = ()
    """The first column of C before it is scaled to norm 1; c_0 = 1. Empty until a plan has settled them."""

    def __post_init__(self) -> None:
        settle = object.__setattr__
        settle(self, "bands", check.whole("bands", self.bands))
        settle(self, "momentum", check.half_open_unit("momentum", self.momentum))
        settle(self, "weight_decay", check.half_open_unit("weight_decay", self.weight_decay))
        if self.objective not in ("mean", "max"):
            raise check.refuse("objective", self.objective, "'mean' or 'max'")
        given = tuple(check.number("coefficient", one) for one in self.coefficients)
        if given and (len(given) != self.bands or given[0] != 1.0 or not all(map(math.isfinite, given))):
            raise check.refuse("coefficients", given, f"{self.bands} finite numbers, of which the first is 1")
        settle(self, "coefficients", given)

    @classmethod
    def inverse_root(cls, bands: int, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Banded:
        """The closed form: the square root of the workload, cut to its first `bands` diagonals   [KL24].

        For prefix sums that is the inverse root (I - S)^(-1/2) = 1, 1/2, 3/8, 5/16, ... of the differences. C itself is
        banded, as amplification by sampling needs; a C whose inverse is banded instead is not.
        """
        made = cls(bands, momentum, weight_decay)
        return replace(made, coefficients=tuple(map(float, _root(made.workload(made.bands)))))

    @cached_property
    def sensitivity(self) -> float:
        """The largest norm of a column of Toeplitz(c), rounded up: what scaling C to norm 1 divides by."""
        norm = math.sqrt(math.fsum(c * c for c in self._settled))
        return norm if self.bands == 1 else norm * (1 + 2**-48)  # more than the roundings of squares, sum and root

    def settled(self, steps: int) -> Banded:
        """The same with the coefficients for a run of `steps`.

        Raises:
            InvalidArgument: there are more bands than steps, or given coefficients make noise that grows.
        """
        if self.bands > check.whole("steps", steps):
            raise check.refuse("bands", self.bands, f"at most the run's {steps} steps")
        if not self.coefficients:
            found = _optimised(self.bands, self.momentum, self.weight_decay, self.objective, steps)
            return replace(self, coefficients=found)
        if not np.abs(self.inverse(steps)).max() <= _LARGEST:
            raise check.refuse("coefficients", self.coefficients, "a C whose inverse stays small", "this noise grows")
        return self

    def inverse(self, steps: int) -> Floats:
        """The first column of Toeplitz(c)^-1."""
        return _divided(_impulse(steps), self._settled)

    def workload(self, steps: int) -> Floats:
        """The first column of A: what one gradient has moved the parameters by, step after step, at learning rate 1."""
        recursion = (1.0, -(1.0 + self.momentum - self.weight_decay), self.momentum)
        return _divided(_impulse(steps), recursion)

    def variance_at(self, step: int) -> float:
        """The variance of a step's noise, relative to what independent noise has."""
        return self.sensitivity**2 * float(self._powers(step + 1)[step])

    def rms_error(self, steps: int) -> float:
        """Root mean squared error of A x over a run of `steps`, for z of deviation 1."""
        return self.sensitivity * math.sqrt(_error(self._effect(steps), "mean"))

    def max_error(self, steps: int) -> float:
        """The largest deviation of A x over a run of `steps`, for z of deviation 1: that of the last step."""
        return self.sensitivity * math.sqrt(_error(self._effect(steps), "max"))

    def _effect(self, steps: int) -> Floats:
        return _divided(self.workload(steps), self._settled)

    def _powers(self, steps: int) -> Floats:
        """Sums of squares of C^-1's first column, cached for the next power of two of steps."""
        return _squares(self._settled, 1 << (steps - 1).bit_length())

    @property
    def _settled(self) -> tuple[float, ...]:
        if self.coefficients:
            return self.coefficients
        if self.bands == 1:
            return (1.0,)
        raise InvalidArgument(f"{self}: coefficients are not settled; want Banded(...).settled(steps), or a plan's")


def _impulse(steps: int) -> Floats:
    found = np.zeros(steps)
    found[0] = 1.0
    return found


def _divided(series: Floats, by: tuple[float, ...] | Floats) -> Floats:
    """The power series `series` / `by`, as long as `series`: forward substitution with a Toeplitz matrix."""
    quotient: Floats = lfilter([1.0], by, series)
    return quotient


@lru_cache(maxsize=8)
def _squares(coefficients: tuple[float, ...], steps: int) -> Floats:
    found: Floats = np.cumsum(_divided(_impulse(steps), coefficients) ** 2)
    return found


def _root(series: Floats) -> Floats:
    """The power series whose square is `series`, which begins with 1."""
    root = np.zeros_like(series)
    root[0] = 1.0
    for n in range(1, len(series)):
        root[n] = (series[n] - root[1:n] @ root[n - 1 : 0 : -1]) / 2
    return root


def _weights(steps: int, objective: Objective) -> Floats:
    """Entry i of a Toeplitz matrix's first column stands in T - i rows, of which the last has them all."""
    return np.arange(steps, 0, -1) / steps if objective == "mean" else np.ones(steps)


def _error(effect: Floats, objective: Objective) -> float:
    """The mean, over the rows of a lower triangular Toeplitz matrix, or the largest of their squared norms."""
    return float(_weights(len(effect), objective) @ effect**2)


@lru_cache(maxsize=32)
def _optimised(bands: int, momentum: float, weight_decay: float, objective: Objective, steps: int) -> tuple[float, ...]:
    """The coefficients with the least log of sensitivity^2 x error: L-BFGS from the closed form, in float64.

    With h = a / c as power series, dh/dc_j = -x^j h / c: two filters and a correlation give the whole gradient.
    """
    begun = Banded.inverse_root(bands, momentum=momentum, weight_decay=weight_decay)
    if bands == 1:
        return begun.coefficients
    workload, weights = begun.workload(steps), _weights(steps, objective)

    def value_and_gradient(tail: Floats) -> tuple[float, Floats]:
        c: Floats = np.concatenate([[1.0], tail])
        with np.errstate(all="ignore"):
            h = _divided(workload, c)
            error, slope = float(weights @ h**2), _divided(h, c)
            if not math.isfinite(error) or not np.isfinite(slope).all():
                return 1e300, np.zeros_like(tail)  # noise that grows without bound
            weighted = weights * h
            lags = [float(weighted[j:] @ slope[: steps - j]) for j in range(1, bands)]
        square = float(c @ c)
        return math.log(square * error), 2 * tail / square - 2 * np.array(lags) / error

    options: dict[str, Any] = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30}
    start = np.array(begun.coefficients[1:])
    found = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    best = found.x if found.fun < value_and_gradient(start)[0] else start
    return (1.0, *(round(float(c), _DIGITS) for c in best))


log = logging.getLogger("terrine.sgd")


class CorrelatedNoise:
    """The noise of a run from step `first` on, for `parameters` in order; holds the last bands - 1 vectors."""

    def __init__(self, banded: Banded, key: Key, parameters: Iterable[Tensor], *, first: int = 0) -> None:
        self._banded, self._key, self.first = banded, key, first
        self._like = [(one.device, one.numel()) for one in parameters]
        self._past: dict[torch.device, Tensor] = {}  # (bands - 1, numbers); y_t lies in row t mod (bands - 1)
        self._following = first
        log.warning(
            "correlated noise keeps %d vectors of %d numbers: %.1f MB beside the model",
            banded.bands - 1,
            sum(count for _, count in self._like),
            self.memory / 1e6,
        )

    @property
    def memory(self) -> int:
        """The bytes that are kept from step to step."""
        return 4 * (self._banded.bands - 1) * sum(count for _, count in self._like)

    def protect(self, totals: Sequence[Tensor], step: int, deviation: float, over: float = 1.0) -> None:
        """Add the noise of `step` in place, round to a public grid, and divide by `over`.

        `deviation` is that of z. The grid is 2^-10 of what is new in the noise of a step, given all steps before.

        Raises:
            OutOfOrder: the step is over.
        """
        grid = grid_of(deviation * self._banded.sensitivity)
        for total, noise in zip(totals, self.at(step), strict=True):
            wide = total.to(torch.promote_types(total.dtype, torch.float32)).mul_(1 / grid)
            wide.add_(noise.view(total.shape), alpha=deviation / grid).round_().mul_(grid / over)
            if wide is not total:
                total.copy_(wide)

    def at(self, step: int) -> list[Tensor]:
        """The noise of `step` for each parameter, flat, for z of deviation 1; until the next step is asked for.

        Raises:
            OutOfOrder: a later step was asked for before.
        """
        if step < self._following:
            raise OutOfOrder(f"the noise of step {step + 1} was used; want step {self._following + 1} or later")
        while self._following <= step:
            self._advance()
        row = step % (self._banded.bands - 1)
        parts = {
            device: iter(past[row].split([count for one, count in self._like if one == device]))
            for device, past in self._past.items()
        }
        return [next(parts[device]) for device, _ in self._like]

    def _advance(self) -> None:
        if not self._past:
            self._past = self._zeros()
        step, self._following = self._following, self._following + 1
        draw, rows, c = self._key.draw(Purpose.NOISE, step), self._banded.bands - 1, self._banded.coefficients
        for device, past in self._past.items():
            for here in past.split(BLOCK if device.type == "cpu" else LARGE, dim=1):
                new = here[step % rows].mul_(-c[rows])  # the oldest vector makes room for the newest
                for back in range(1, rows):
                    new.sub_(here[(step - back) % rows], alpha=c[back])
            draw.add_normal(past[step % rows], self._banded.sensitivity)

    def _zeros(self) -> dict[torch.device, Tensor]:
        rows, devices = self._banded.bands - 1, dict.fromkeys(device for device, _ in self._like)
        sizes = {one: sum(count for device, count in self._like if device == one) for one in devices}
        return {device: torch.zeros(rows, size, device=device) for device, size in sizes.items()}


__all__ = ["Banded", "CorrelatedNoise"]
