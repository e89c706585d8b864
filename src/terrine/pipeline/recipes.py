"""Defaults for a run, from public numbers only: how many examples, which model, which budget.

They were chosen on published data (digits, Adult, MNIST), never on the data at hand. What decides is how much noise a
step puts on the mean gradient, r = noise / lot in clipping bounds: large lots make it small, and the more of it there
is the shorter the steps must be. So lots are a large share of the data, and the learning rate falls with r.

Scattering features, and large tables, are whitened for a linear model (`whitened.py`). The two releases are noisy in
proportion to 1/epsilon, so that they take the same small share of any budget: a larger one where there are few
examples, whose mean and moments would drown in noise otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from terrine import accounting, check
from terrine.events import Budget, Gaussian
from terrine.linear import LARGEST_WIDTH
from terrine.pipeline.settings import LEAST_SQUARES, TRAINED_ONLY, Settings

_ONE_RELEASE = 4_000
"""Up to so many examples x epsilon, one release is better than a training."""
WITHIN = 2.0
"""How many points an accuracy may be off, unless asked for otherwise."""
_SHARES = (0.05, 0.1, 0.2)
"""Of epsilon, what an accuracy may cost."""
_MOST_STEPS = 1e9
_AUDITED_MOST = 1000
_CANARIES_MOST = 120
_WIDE = 1000
_MANY = 10_000
"""From so many examples on, what is chosen for sets of thousands gives way to what is chosen for MNIST's size."""


@dataclass(frozen=True)
class Defaults:
    """How DP-SGD trains."""

    lot: int
    epochs: float
    clip: float
    momentum: float = 0.9
    average: float = 0.9


def recipe(settings: Settings, kind: str, examples: int) -> Defaults:
    """The recipe for a kind of model and so many examples; what the settings say goes first."""
    most, epochs, clip, average = {
        "linear": (8192, 40.0, 0.5, 0.9),
        "whitened linear": (2048, 40.0, 0.3, 0.99),
        "whitened scatter-linear": (4096, 40.0, 0.1, 0.98 if examples >= _MANY else 0.9),
    }.get(kind, (8192, 30.0, 1.0, 0.9))
    usual = max(1, min(examples, max(examples // 2, 256), most))
    lot = usual if settings.lot is None else min(settings.lot, examples)
    if settings.epochs is not None and settings.epochs * examples / lot > _MOST_STEPS:
        hint = f"at most {_MOST_STEPS:g} steps in all; this would take {settings.epochs * examples / lot:.3g}"
        raise check.refuse("epochs", settings.epochs, f"at most {_MOST_STEPS * lot / examples:g}", hint)
    return Defaults(
        lot=lot,
        epochs=epochs if settings.epochs is None else settings.epochs,
        clip=clip if settings.clip is None else settings.clip,
        average=average,
    )


def model(settings: Settings, shape: tuple[int, ...], classes: int, examples: int) -> str:
    """The model where none is asked for: what `benchmarks/results.py` says wins on public data.

    One release of least squares wins on large tables while examples x epsilon is small (rows release-...): on Adult
    below about 4,000; above it DP-SGD does, and on a few thousand rows as well. Numbers are learned by least squares.
    """
    if len(shape) > 1:
        return "scatter-linear"
    wanted = any(getattr(settings, name) is not None for name in TRAINED_ONLY)
    few = classes == 0 or (examples >= _MANY and examples * settings.epsilon <= _ONE_RELEASE)
    fits = settings.method == "sgd" and shape[0] < LARGEST_WIDTH
    return LEAST_SQUARES if few and fits and not wanted else "linear"


def learning_rate(kind: str, *, noise: float, lot: int, clip: float) -> float:
    """Steps in proportion to what the noise leaves of a gradient, in clipping bounds."""
    spread = max(noise / lot, 1e-9)
    match kind:
        case "linear":
            return min(max(0.02 / spread, 0.3), 8.0) / clip
        case "whitened linear":
            return min(0.05 / spread, 30.0) / clip
        case "whitened scatter-linear":
            return min(0.5 + 0.01 / spread, 20.0) / clip
        case _:
            return min(0.004 / spread, 2.0)


def whitens(settings: Settings, model: str, shape: tuple[int, ...], examples: int) -> bool:
    """Whether features are whitened first: scattering features are, and so is a large table for a linear model."""
    if settings.method != "sgd":
        return False  # PATE's teachers learn from features as they are
    table = model == "linear" and len(shape) == 1
    images = len(shape) > 1 and model in ("scatter-linear", LEAST_SQUARES)
    return images or (table and examples >= _MANY and shape[0] <= _WIDE)


class Measuring(NamedTuple):
    """What an accuracy on private rows takes."""

    held: int
    """How many units have to be left out of the training."""
    epsilon: float
    """What their noisy counts cost."""
    within: float
    """How far it may be off, 95% sure: noise, and the chance of which units were left out."""


def measuring(settings: Settings, examples: int, sums: int = 1) -> Measuring | None:
    """The cheapest way to an accuracy of the width that is asked for; None where there are too few examples for it.

    A share of m units left out is off by at most sqrt(1 / m) with probability 0.95, whatever it is (twice the largest
    standard deviation of a share); a noisy sum of m values between 0 and 1 by ln(20) / epsilon. The two are
    independent: their squares add. `sums` are paid for alike.
    """
    within = (WITHIN if settings.accuracy_within is None else settings.accuracy_within) / 100
    if within <= 0:
        return None
    for share in _SHARES:
        epsilon = share * settings.epsilon
        held = _held_for(within, epsilon / sums)
        if held <= _most_held(settings, examples):
            return Measuring(held, epsilon, within)
    return None


def reachable(settings: Settings, examples: int, sums: int = 1) -> float:
    """The smallest width, in points, that so many examples allow."""
    most = _most_held(settings, examples)
    return 100 * off_by(most, _SHARES[-1] * settings.epsilon / sums) if most else math.inf


def off_by(held: int, epsilon: float) -> float:
    """How far a share of `held` units, counted with noise of this epsilon, is off at most, 95% sure."""
    return math.hypot(1 / math.sqrt(held), math.log(20) / epsilon / held)


def _held_for(within: float, epsilon: float) -> int:
    """The fewest units that keep a width: the root of off_by, which falls as they grow."""
    half, noise = 1 / (2 * within**2), math.log(20) / (epsilon * within)
    return math.ceil(min(half + math.hypot(half, noise), 2.0**60))


def _most_held(settings: Settings, examples: int) -> int:
    return examples // 5 if settings.audit is None else min(settings.audit, examples // 2) // 2


class WhiteningNoise(NamedTuple):
    """The deviations of the two releases of `private_whitening`."""

    mean: float
    moments: float


def whitening_noise(settings: Settings, examples: int) -> WhiteningNoise:
    """What takes a few hundredths of the budget of large sets, more of small ones."""
    moments = (30.0 if examples >= _MANY else 10.0) / settings.epsilon
    return WhiteningNoise(2 * moments, moments)


class Candidate(NamedTuple):
    """Settings to try."""

    learning_rate: float
    clip: float
    lot: int


def lots(settings: Settings, usual: Defaults) -> list[int]:
    """The lots that tuning draws from: the usual one and a quarter of it, unless given."""
    return [usual.lot] if settings.lot is not None or usual.lot < 64 else [usual.lot, usual.lot // 4]


def candidates(settings: Settings, kind: str, usual: Defaults, *, noises: Mapping[int, float]) -> list[Candidate]:
    """The public grid that tuning draws from: around the usual learning rate and clipping bound, unless given.

    `noises` holds the noise that goes with each lot.
    """
    clips = [usual.clip * factor for factor in (0.25, 0.5, 1.0, 2.0)] if settings.clip is None else [usual.clip]
    factors = (0.25, 0.5, 1.0, 2.0, 4.0) if settings.learning_rate is None else (1.0,)
    found = []
    for (lot, noise), clip in itertools.product(noises.items(), clips):
        middle = settings.learning_rate or learning_rate(kind, noise=noise, lot=lot, clip=clip)
        found += [Candidate(middle * factor, clip, lot) for factor in factors]
    return found


def delta(settings: Settings, examples: int) -> float:
    """The settings' delta, or a power of ten below 1 / examples, at most 1e-5."""
    if settings.delta is not None:
        return settings.delta
    usual = min(1e-5, 10.0 ** -(math.floor(math.log10(examples)) + 1))
    return usual if settings.delta_at_most is None else min(usual, settings.delta_at_most)


def audited(settings: Settings, examples: int, held: int = 0) -> int:
    """How many private rows are left to coins, so that about `held` of them are left out."""
    if settings.audit is not None:
        return min(settings.audit, examples // 2)
    tossed = 2 * held + math.ceil(4 * math.sqrt(held))  # so that seldom fewer than `held` coins fall on tails
    return min(examples, max(min(_AUDITED_MOST, examples // 10), tossed))


def canaries(settings: Settings, examples: int) -> int:
    """How many of those left to coins carry a wrong label. Half of them are left out: a twentieth at most is taught."""
    return min(_CANARIES_MOST, examples // 10, audited(settings, examples))


def teachers(settings: Settings, examples: int) -> int:
    """How many teachers: about 40 examples to each, at most 250 of them."""
    return max(2, min(250, examples // 40)) if settings.teachers is None else settings.teachers


def queries(settings: Settings, *, teachers: int, available: int, delta: float) -> int:
    """How many labels are bought: as many as leave noise of a seventh of the teachers, at least 12.

    q answers of sensitivity sqrt 2 keep the budget of one Gaussian of mean mu where noise = sqrt(2 q) / mu.
    """
    if settings.queries is not None:
        return min(available, settings.queries)
    mu = 1 / accounting.calibrate(lambda noise: Gaussian(noise=noise), Budget(settings.epsilon, delta))
    return min(available, max(12, int((teachers / 7 * mu) ** 2 / 2)))
