"""Delta of a composition by tilted Fourier inversion, with every error bounded or on the safe side.

The losses of a composition add up, so with M the moment function of the sum, for any c > 0,

    delta(e) = E[(1 - e^(e-L))_+] = 1/(2 pi i) * integral over Re z = c of  M(z) e^(-ez) / (z (z+1)) dz.

Summed at points c + ikD instead of integrated, this gives delta(e) plus the terms e^(2 pi k c/D) delta(e + 2 pi k/D),
k != 0: all
positive, so the sum is an upper bound as it stands; for a lower bound they are bounded by Chernoff and subtracted.

The integrand must also be cut off. So (1 - e^(e-L))_+ is replaced by a smooth function whose transform falls like
exp(-b^2 t^2/2):

- upper: its mean over e + N(-b^2/2, b^2), which is larger because it is convex in e^e (it amounts to composing with
  one more
  Gaussian mechanism of mu = b);
- lower: (1 - e^(e-L)) Phi((L-e)/b), the advantage of one particular randomised test.

Both differ from the truth by O(b^2). Beyond the frequencies that are summed, |M(c+it)| <= M(c) and that decay bound
the rest;
in between, a bound on |M| from pairs of nearby losses lets long stretches be skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from terrine.accounting.independent import Composition, FallOff, Part
from terrine.accounting.quadrature import GOAL, MOST_DECAY, Crowded, TiltedDensity

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]

_U = 2.0**-53
_ATOM_ERROR = 160 * _U
"""Relative error granted to an atom's mass and to exp of its tilted loss."""
_DROPPED = _U / 2**20
"""Tilted weight of the atoms that a transform may leave out."""
_BLOCK = 256
"""Sums over atoms run in blocks of this many, so that their rounding error is (block + blocks) ulps at most."""
_SPARE = 1e-6
"""Share of delta that each neglected piece may take."""
_TYPICAL_ERROR = 2e-13
"""About what `_Stretch.error` comes to; used only to choose well."""
_OCTAVES = 2.0 ** np.arange(-12, 1)
_ROOM = 1.1
"""The opposite direction's transform may fall off later, by this factor in the frequency."""
_SETTLED = 0.1
"""How far log moments may be from those on better nodes, over all steps."""
_SKIPPED = 0.5
"""Frequencies are skipped down to this share of the last one, and again."""
_WORTH_SKIPPING = 50_000
"""Below this many terms of a transform, summing them all is cheaper than proving that some may be skipped."""
_FEW = 16_384
"""Up to this many, sines are cheaper than the bookkeeping that saves them."""
_MOST_TERMS = 200_000
"""Past this many frequencies, another method is tried."""
_MOST_WORK = 2e8
"""The same for frequencies times atoms."""
_MOST_BINS = 100_000
"""Past this many bins a bound on a transform is not worth its time."""


@dataclass(frozen=True)
class InversionSettings:
    """Where and how finely to sum: the tilt c, the period 2 pi/D, the blur b, the last frequency, what lies beyond.

    Moments were looked at up to `reach` times the tilt; a lower bound rests on some of them, too. `log_moment` is
    about the one at the tilt.
    """

    tilt: float
    period: float
    blur: float
    last: float
    fall_off: FallOff
    reach: float
    log_moment: float

    @property
    def step(self) -> float:
        return 2 * math.pi / self.period


_RATIOS = np.array([1.1, 1.2, 1.35, 1.42, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 16.0, 32.0])
"""Orders above the tilt at which Chernoff's bound is tried, as multiples of it."""
_AND_RATIOS = np.concatenate([[1.0], _RATIOS])
_LOWER_TILTS = (0.8, 0.6, 0.4)
_LONG = 10.0
"""As many times as long as it must be, a period on nodes is worth the search for another tilt."""


def choose(
    composition: Composition, tilt: float, epsilon: float, delta: float, precision: float, reach: float = 4.0
) -> InversionSettings:
    """Settings near `tilt` that need the fewest terms for a relative error of about `precision` in epsilon."""
    allowed = math.log(_SPARE * delta)
    first = _settings(composition, tilt, epsilon, allowed, precision, reach)
    if composition.all_nodes and first.period * tilt < -_LONG * allowed:
        return first
    rounding = math.log(sum(part.times for part in composition.parts) * _TYPICAL_ERROR + 1e-300)

    def dearness(one: InversionSettings) -> float:
        """log of the number of terms, and of how far rounding would rise above a small share of delta."""
        size = one.log_moment - one.tilt * epsilon + rounding - math.log1p(one.tilt)
        return math.log(one.period * one.last) + 3 * max(0.0, size - math.log(1e-5 * delta))

    lower = (_settings(composition, ratio * tilt, epsilon, allowed, precision, reach) for ratio in _LOWER_TILTS)
    return min([first, *lower], key=dearness)


def _settings(
    composition: Composition, tilt: float, epsilon: float, allowed: float, precision: float, reach: float
) -> InversionSettings:
    """Settings for one tilt; `allowed` is log of what each neglected piece may amount to."""
    orders = _AND_RATIOS[reach >= _AND_RATIOS] * tilt
    values, above = composition.about_log_moment(orders), orders[1:]
    left = -allowed / tilt
    right = float(np.minimum.reduce((values[1:] - above * epsilon + _log_peak(above) - allowed) / (above - tilt)))
    blur = min(1.0, math.sqrt(2 * precision * max(epsilon, 0.02 / tilt) / (tilt + 1)))
    decay = max(2.0, float(values[0]) - tilt * epsilon - allowed)
    last = math.sqrt(2 * decay / (blur**2 + composition.gaussian))
    if last > composition.lattice_limit:
        last = composition.lattice_limit
        blur = math.sqrt(max(blur**2, 2 * decay / last**2 - composition.gaussian))
    fall_off = composition.fall_off(tilt)
    if (unblurred := fall_off.frequency(decay)) < last:
        blur, last = 0.0, min(last, _ROOM * unblurred)
    return InversionSettings(tilt, max(left, right), blur, last, fall_off, reach, float(values[0]))


@dataclass(eq=False)
class Inversion:
    """The sum, prepared once for a tilt; `upper` and `lower` then cost one dot product for each epsilon."""

    composition: Composition
    settings: InversionSettings
    is_upper: bool
    delta: float
    epsilon: float
    beside: tuple[Inversion, list[_Stretch]] | None = None
    """The other direction's, with nodes and powers to share, and this one's parts on them."""
    stretches: list[_Stretch] = field(init=False)
    stop: float = field(init=False)
    frequency: Floats = field(init=False)
    common: Complexes = field(init=False)
    angle: Floats = field(init=False)
    size: Floats = field(init=False)
    top: float = field(init=False)
    error: float = field(init=False)
    error_slope: float = field(init=False)
    rest: float = field(init=False)

    def __post_init__(self) -> None:
        now = self.settings
        self.stretches, self.stop = self._serve() if self.beside is None else self._share(*self.beside)
        if self.beside is None:
            self._check_work()
            self.frequency = now.step * np.arange(math.ceil(self.stop / now.step) + 1, dtype=np.float64)
            self.common = self._common()
        else:
            self.frequency, self.common = self.beside[0].frequency, self.beside[0].common
        log_size, angle, doubt = self.common.real.copy(), self.common.imag.copy(), np.zeros(self.frequency.size)
        for stretch in self.stretches:
            size, log_own, turned = _one_plus(*stretch.transform(now.step, doubt.size))
            doubt += stretch.times * np.log1p(stretch.error(self.frequency) / size)
            log_size += stretch.times * (log_own + stretch.log_moment)
            angle += stretch.times * turned
        self.angle = angle
        self._scale(log_size, doubt)

    def _check_work(self) -> None:
        """
        Raises:
            Crowded: the sum would have too many terms.
        """
        terms = self.stop / self.settings.step
        if terms > _MOST_TERMS or terms * max((one.size for one in self.stretches), default=1) > _MOST_WORK:
            raise Crowded

    def _common(self) -> Complexes:
        """log of the integrand at epsilon 0 but for the parts' moments, which is the same in both directions."""
        z = np.empty(self.frequency.size, dtype=complex)
        z.real, z.imag = self.settings.tilt, self.frequency
        log_value = np.log(self._kernel(z)) + math.log(self.settings.step / math.pi)
        log_value[0] -= math.log(2)
        return np.asarray(log_value + self._smooth_part(z), dtype=complex)

    def _scale(self, log_size: Floats, doubt: Floats) -> None:
        """Sizes over a common scale, and the rounding error over it at epsilon 0 and for each unit of epsilon."""
        at_most = log_size + doubt
        self.top = float(np.maximum.reduce(at_most))
        self.size = np.exp(log_size - self.top)
        powers = np.exp(at_most - self.top) @ -np.expm1(-doubt)
        phases = self.size @ (4 + np.abs(self.angle) + np.abs(log_size))
        self.error = float(powers) + 16 * _U * float(phases)
        self.error_slope = 16 * _U * float(self.size @ (self.frequency + self.settings.tilt))

    def opposite(self) -> Inversion:
        """The other direction on the same nodes and frequencies.

        Raises:
            Crowded: they do not serve it.
        """
        composition, now = self.composition.opposite(), self.settings
        pairs = zip(composition.parts, self.stretches, strict=True)
        turned = [_Stretch(part, now.tilt, opposite=own) for part, own in pairs]
        composition.learn(now.tilt, [one.log_moment for one in turned])
        settings = replace(now, fall_off=composition.fall_off(now.tilt))
        return Inversion(composition, settings, self.is_upper, self.delta, self.epsilon, beside=(self, turned))

    def _share(self, other: Inversion, stretches: list[_Stretch]) -> tuple[list[_Stretch], float]:
        """Where the other one stopped, and its nodes under this tilt."""
        tilt, last = self.settings.tilt, self.settings.last
        moments = self.composition.log_moments(tilt)
        _, self.rest = self._where_to_stop([], moments, 0)
        if other.stop < last or self.rest > math.log(1e-3 * self.delta) + tilt * self.epsilon:
            raise Crowded
        nodes = [part.losses.nodes for part in self.composition.parts]
        if not all(one and one.serve(tilt, last, moment) for one, moment in zip(nodes, moments, strict=True)):
            raise Crowded
        return stretches, last

    def _serve(self) -> tuple[list[_Stretch], float]:
        """Find where to stop, and give the parts nodes that serve up to there; again, if moments change much."""
        tilt, worth_skipping = self.settings.tilt, _WORTH_SKIPPING
        if self.composition.all_nodes and self.settings.last > _MOST_TERMS * self.settings.step:
            raise Crowded
        for _ in range(3):
            parts, moments = self.composition.parts, self.composition.log_moments(tilt)
            densities = [_density(part, tilt, one) for part, one in zip(parts, moments, strict=True)]
            stop, self.rest = self._where_to_stop(densities, moments, worth_skipping)
            try:
                stretches = self._stretches(densities, moments, stop)
            except Crowded:
                if worth_skipping == 0:
                    raise
                worth_skipping = 0
                continue
            apart = sum(one.times * abs(one.log_moment - old) for one, old in zip(stretches, moments, strict=True))
            if apart < _SETTLED:
                self.rest += apart / (1 - MOST_DECAY)  # what the bounds on transforms owe to the old moments
                return stretches, stop
        raise Crowded

    def _stretches(
        self, densities: list[_Stretch | TiltedDensity], moments: list[float], stop: float
    ) -> list[_Stretch]:
        """All parts under the tilt, on nodes that serve up to `stop`, which the composition keeps."""
        tilt = self.settings.tilt
        highest = tilt if self.is_upper else min(2.0, self.settings.reach) * tilt
        parts, stretches = [], []
        for part, density, moment in zip(self.composition.parts, densities, moments, strict=True):
            refined = part.refined(tilt, stop, moment, highest=highest)
            parts.append(refined)
            stretches.append(density if isinstance(density, _Stretch) else _Stretch(refined, tilt))
        known = self.composition
        self.composition = Composition(tuple(parts), known.gaussian, known.lattice, known.lattice_limit)
        return stretches

    def __call__(self, epsilon: float) -> float:
        """A proven bound on delta at `epsilon`: from above, or from below."""
        log_scale = self.top - self.settings.tilt * epsilon
        if log_scale > 600:  # epsilon is far from where the tilt was chosen: nothing is proven here
            return 1.0 if self.is_upper else 0.0
        total = math.exp(log_scale) * float(self.size @ np.cos(self.angle - self.frequency * epsilon))
        doubt = self.doubt_at(epsilon)
        if math.isnan(total + doubt):
            return 1.0 if self.is_upper else 0.0
        if self.is_upper:
            return min(1.0, total + doubt + self.composition.escaped)
        return total - doubt - self._aliases(epsilon) + self.composition.escaped * (1 - 1e-9)

    def doubt_at(self, epsilon: float) -> float:
        """What rounding may have done to the sum, and what lies beyond its last frequency."""
        shift = self.settings.tilt * epsilon
        beyond = math.exp(min(600.0, self.rest - shift))
        return math.exp(min(600.0, self.top - shift)) * (self.error + self.error_slope * epsilon) + beyond

    def _smooth_part(self, z: Complexes) -> Complexes | float:
        variance = self.composition.gaussian + self.composition.lattice
        blur = self.settings.blur**2
        if variance + blur == 0:
            return 0.0
        if self.is_upper:
            return (variance + blur) * z * (z + 1) / 2
        return variance * z * (z + 1) / 2 + blur * z * z / 2

    def _kernel(self, z: Complexes) -> Complexes:
        if self.is_upper:
            return 1 / (z * (z + 1))
        # e^(b^2 z^2/2)/z - e^(b^2 (z+1)^2/2)/(z+1), with the first exponential taken out
        kernel: Complexes = (1 - z * np.expm1(self.settings.blur**2 * (z + 0.5))) / (z * (z + 1))
        return kernel

    def _where_to_stop(
        self, densities: list[_Stretch | TiltedDensity], moments: list[float], worth_skipping: int
    ) -> tuple[float, float]:
        """The last frequency to sum, and log of a bound (at epsilon 0) on all that lies beyond it.

        Where the parts' transforms provably stay negligible from some point up to `last`, that stretch is skipped.
        """
        now = self.settings
        counts = [part.times for part in self.composition.parts]
        value = (self.composition.gaussian + self.composition.lattice) * now.tilt * (now.tilt + 1) / 2
        value += math.fsum(times * (one + GOAL) for times, one in zip(counts, moments, strict=True))
        beyond = value + self._log_kernel_beyond(now.last)
        allowed = math.log(_SPARE * self.delta) + now.tilt * self.epsilon
        stop = now.last
        work = now.last / now.step * max((one.size for one in densities), default=0)
        while stop > now.step and work > worth_skipping:
            low = _SKIPPED * stop
            decay = value + self._log_kernel_between(low, stop)
            for times, one in zip(counts, densities, strict=True):
                if decay > allowed:
                    decay += times * one.log_decay(low, stop)
            if decay > allowed:
                break
            stop, beyond = low, float(np.logaddexp(beyond, decay))
        return stop, beyond + 1e-9 * (1 + abs(beyond))  # these were computed in floating point, too

    def _log_kernel_beyond(self, t: float) -> float:
        """log of a bound on 1/pi times the integral from t on of |kernel x smooth part|, the latter over its value at
        c."""
        decay = -(self.composition.gaussian + self.settings.blur**2) * t * t / 2
        fall = self.settings.fall_off.log_at(t)
        if self.is_upper or self.settings.blur == 0:  # |kernel| <= 1/t^2
            return decay + fall + self._blur_at_tilt - math.log(math.pi * t)
        return decay + self._blur_at_tilt + math.log(2 / math.pi) - math.log(-2 * decay)  # |kernel| <= 2/t

    def _log_kernel_between(self, start: float, stop: float) -> float:
        decay = -(self.composition.gaussian + self.settings.blur**2) * start * start / 2
        if self.is_upper or self.settings.blur == 0:
            return decay + self._blur_at_tilt - math.log(math.pi * start)
        return decay + self._blur_at_tilt + math.log(2 / math.pi * math.log(stop / start))

    @property
    def _blur_at_tilt(self) -> float:
        c, blur = self.settings.tilt, self.settings.blur**2
        return blur * c * (c + 1) / 2 if self.is_upper else blur * (c + 1) ** 2 / 2

    def _aliases(self, epsilon: float) -> float:
        """What the sum may contain beyond delta itself, on both sides."""
        now = self.settings
        left = math.exp(-now.tilt * now.period) / -math.expm1(-now.tilt * now.period)
        orders, values = self._chernoff
        gap = (orders - now.tilt) * now.period
        right = float(np.min(values - orders * epsilon - gap - np.log(-np.expm1(-gap))))
        return left + math.exp(min(700.0, right))

    @cached_property
    def _chernoff(self) -> tuple[Floats, Floats]:
        orders = _RATIOS * self.settings.tilt
        return orders, self.composition.log_moments_above(orders) + _log_peak(orders)


class _Stretch:
    """One part under the tilt: its weights, moments and transform.

    Transforms are kept as E[e^(itL)] - 1 and moments as E[e^(cL)] - 1, since masses add up to 1 by definition: then
    errors are relative to what a step reveals, not to 1, and survive multiplication by hundreds of millions of steps.
    """

    def __init__(self, part: Part, tilt: float, opposite: _Stretch | None = None) -> None:
        self.times, self.tilt, self._opposite = part.times, tilt, opposite
        self.halves: tuple[Floats, Floats] | None = None
        losses = part.losses
        self.nodes = losses.nodes
        exponent = tilt * losses.loss
        top = max(0.0, float(np.maximum.reduce(exponent)))
        grown = losses.mass * np.exp(exponent - top)
        if top < 30:
            moved = losses.mass * np.expm1(exponent)
            self.log_moment = math.log1p(float(np.add.reduce(moved)) - losses.escaped)
            moment = math.exp(self.log_moment - top)
            self.moved = float(np.add.reduce(np.abs(moved))) * math.exp(-self.log_moment)
        else:
            moment = float(grown.sum())
            self.log_moment = top + math.log(moment)
            self.moved = 1.0
        self.loss, self.mass = losses.loss, grown / moment
        if self.nodes is None:
            kept = self.mass > _DROPPED / self.mass.size
            self.loss, self.mass = self.loss[kept], self.mass[kept]
        self.size = self.loss.size
        self.mean_size = float(self.mass @ np.abs(self.loss))

    def transform(self, step: float, count: int) -> tuple[Floats, Floats]:
        """E[e^(itL)] - 1 under the tilt at t = k step, k < count: its real and imaginary parts."""
        if count * self.size < _FEW:
            kept = self._opposite.halves if self._opposite is not None else None  # its losses are these, negated
            squares, products = kept or self._half_angles(step, count)
            return squares @ (-2 * self.mass), products @ (-2 * self.mass if kept else 2 * self.mass)
        whole = self._factored(step, count)
        return whole.real, whole.imag

    def _half_angles(self, step: float, count: int) -> tuple[Floats, Floats]:
        """s^2 and s c of every angle's half: e^(ia) - 1 = 2 (-s^2 + i s c)."""
        tangent = np.tan(np.multiply.outer(np.arange(count, dtype=float), 0.5 * step * self.loss))
        products = tangent / (1 + tangent * tangent)  # of all the functions, numpy's fastest is the tangent
        self.halves = tangent * products, products
        return self.halves

    def _factored(self, step: float, count: int) -> Complexes:
        """By one matrix product, as e^(i(a + Bb)x) = e^(iax) e^(iBbx)."""
        rows = max(1, math.ceil(math.sqrt(count)))
        columns, angle = math.ceil(count / rows), step * self.loss
        coarse, fine = _powers_less_one(rows * angle, columns), _powers_less_one(angle, rows) * self.mass
        total: Complexes = np.zeros((columns, rows), dtype=complex)
        for first in range(0, self.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            total += (1 + coarse[:, block]) @ fine[:, block].T
            total += (coarse[:, block] @ self.mass[block])[:, None]
        return total.ravel()[:count]

    def error(self, t: Floats) -> Floats:
        """A bound on the rounding error of `transform`, and of the moment and the atoms that it stands on."""
        terms = _ATOM_ERROR + 4 * _U * (_BLOCK + self.loss.size / _BLOCK + 64)
        if self.nodes is not None:
            terms += self.nodes.rounding * _U
        phases = 8 * _U * self.mean_size
        fixed = 2 * _DROPPED + terms * self.moved + phases * self.tilt
        if self.nodes is not None:  # at t, at 0, and in the sum of all masses
            fixed += 2 * GOAL + self.nodes.mass_error
        if t[-1] * self.mean_size < 2:  # E|e^(itL) - 1| <= t E|L|
            return fixed + (phases + 3 * terms * self.mean_size) * t
        return np.asarray(fixed + phases * t + 3 * terms * self._size_above(t), dtype=float)

    def _size_above(self, t: Floats) -> Floats:
        """A bound on E|e^(itL) - 1|, rising with t."""
        at = float(t[-1]) * _OCTAVES
        size: Floats = np.minimum(2.0, at[:, None] * np.abs(self.loss)) @ self.mass
        return size[np.minimum(np.searchsorted(at, t), at.size - 1)]

    def log_decay(self, low: float, high: float) -> float:
        """log of a bound on |E e^(itL)| over [low, high].

        1 - |.|^2 = E[1 - cos t(L-L')], and 1 - cos x >= 2 x^2 / pi^2 up to pi: count the pairs that fall into one bin
        of
        width pi/high, for which E[(L-L')^2] is twice the bin's variance.
        """
        width = math.pi / high
        position = (self.loss - self.loss.min()) / width
        if position.max() > _MOST_BINS:
            return 0.0
        index = position.astype(np.intp)
        offset = (position - index - 0.5) * width
        mass = np.bincount(index, self.mass)
        first = np.bincount(index, self.mass * offset)
        second = np.bincount(index, self.mass * offset**2)
        pairs = float(np.sum(np.maximum(mass * second - first**2, 0.0))) * (1 - 1e-6)
        return 0.5 * math.log1p(-min(4 / math.pi**2 * low**2 * pairs, 1 - 1e-9))


def _density(part: Part, tilt: float, log_moment: float) -> _Stretch | TiltedDensity:
    """What bounds a part's transform."""
    nodes = part.losses.nodes
    return _Stretch(part, tilt) if nodes is None else nodes.tilted(tilt, log_moment)


def _log_peak(order: Floats) -> Floats:
    """log of the largest (1 - e^-y) e^(-order y): the constant in delta(e) <= peak M(order) e^(-order e)."""
    peak: Floats = order * np.log(order / (1 + order)) - np.log1p(order)
    return peak


def _one_plus(real: Floats, imaginary: Floats) -> tuple[Floats, Floats, Floats]:
    """|1 + value|, its logarithm, precise where the value is small, and its angle; a size of 0 counts as 1e-280."""
    beyond = real * (2 + real) + imaginary * imaginary  # |1 + value|^2 - 1
    angle = np.arctan2(imaginary, 1 + real)
    if np.minimum.reduce(beyond) > -0.5:
        return np.sqrt(1 + beyond), 0.5 * np.log1p(beyond), angle
    size = np.maximum(np.hypot(1 + real, imaginary), 1e-280)
    return size, np.where(beyond > -0.5, 0.5 * np.log1p(np.maximum(beyond, -0.5)), np.log(size)), angle


def _powers_less_one(angle: Floats, count: int) -> Complexes:
    """e^(i k angle) - 1 for k < count; (1+a)(1+b) - 1 = a + b + ab keeps small ones precise."""
    result = np.empty((count, angle.size), dtype=complex)
    result[0] = 0.0
    done = 1
    while done < count:
        more = min(done, count - done)
        turn = done * angle
        leap = -2 * np.sin(turn / 2) ** 2 + 1j * np.sin(turn)
        block = result[done : done + more]
        np.multiply(result[:more], 1 + leap, out=block)
        block += leap
        done += more
    return result
