"""The plan of a run: the one value that its sampler, its noise and its event all come from.

One step of DP-SGD [ACG16], Algorithm 1, with the expected lot size L and the clipping bound C:

    theta <- theta - rate/L ( sum over the lot of clip(g_i, C) + N(0, (noise reach C)^2 I) )

where reach is 1 under add/remove and zero-out neighbours and 2 under replace-one (see `sampling`). A lot is of
examples, or of people: then g_i is the mean over the gradients of at most `rows_per_person` of a person's rows.

What may change during a run, fixed in advance by the plan or steered by a billed release.

Stages      factors for equal, successive parts of the run; for the noise or for the clipping bound
Adaptive    the bound follows a quantile of the gradient norms: C <- C exp(-learning_rate (b - quantile)), where b is
            the fraction of examples with norm <= C, released with Gaussian noise              [ATMR21] Algorithm 1
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from terrine import accounting, check
from terrine.common.correlated import Banded
from terrine.errors import BudgetExceeded, InvalidArgument, WeakGuarantee
from terrine.events import Budget, Composed, Event, Gaussian, NonPrivate, Reproducible, Unit, settled_unit
from terrine.sgd.clipping import ClippingRule, Flat
from terrine.sgd.metrics import Metric
from terrine.sgd.sampling import Poisson, Sampling, Stage, separated

_FOUND_BY_THE_PLAN: Any = None
_SAMPLING = ("reach", "steps", "event", "draw")  # what `Sampling` has

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stages:
    """`factors[k]` holds during the k-th of equal, successive parts of the run."""

    factors: tuple[float, ...]

    def __init__(self, *factors: float) -> None:
        if not factors:
            raise check.refuse("factors", factors, "at least one")
        object.__setattr__(self, "factors", tuple(check.positive("factor", one) for one in factors))

    @classmethod
    def between(cls, first: float, last: float, *, parts: int = 10) -> Stages:
        """A geometric way from `first` to `last` in `parts` stages."""
        parts = check.whole("parts", parts, at_least=2)
        first, last = check.positive("first", first), check.positive("last", last)
        return cls(*(first * (last / first) ** (k / (parts - 1)) for k in range(parts)))

    def at(self, step: int, steps: int) -> float:
        """The factor at `step` of a run of `steps`."""
        return self.factors[min(step * len(self.factors) // steps, len(self.factors) - 1)]


CONSTANT = Stages(1.0)


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A flat clipping bound that follows the `quantile` of the norms, by a count released at every step.

    `noise` is the count's own noise, relative to what one example moves it; None takes a tenth of the lot, at
    least 10, which costs the gradients next to nothing. The count is part of the plan's event.
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", check.moderate("initial", self.initial))
        object.__setattr__(self, "quantile", check.open_unit("quantile", self.quantile))
        object.__setattr__(self, "learning_rate", check.positive("learning_rate", self.learning_rate))
        if self.noise is not None:
            object.__setattr__(self, "noise", check.moderate("noise", self.noise))

    def count_noise(self, lot: int) -> float:
        """The noise multiplier of the count for lots of this size."""
        return max(lot / 10, 10.0) if self.noise is None else self.noise

    def following(self, bound: float, fraction: float) -> float:
        """The next bound, after a noisy `fraction` of the examples was within the present one."""
        exponent = -self.learning_rate * (min(max(fraction, 0.0), 1.0) - self.quantile)
        least, most = check.MODERATE
        return min(max(bound * math.exp(exponent), least), most)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a private run will do, decided before it looks at the data.

    Give `examples`, how many there are, or `people` and `rows_per_person`: what is protected is then a person.
    Give `epochs` or `steps`, and either `budget` (the noise is then the least that keeps it) or `noise` and `delta`.
    With both a budget and a noise, the noise is used and must keep the budget.

    Guarantee: a run made from this plan costs at most `plan.event`, priced as (`plan.epsilon`, `plan.delta`).

    Raises:
        InvalidArgument: a field is out of range, or two fields contradict each other.
        BudgetExceeded: no noise keeps the budget, or the given noise does not.
    """

    examples: int | None = None
    people: int | None = None
    rows_per_person: int | None = None
    lot: int
    clip: float | ClippingRule | Adaptive
    epochs: float | None = None
    steps: int = _FOUND_BY_THE_PLAN
    budget: Budget | None = None
    noise: float = _FOUND_BY_THE_PLAN
    delta: float = _FOUND_BY_THE_PLAN
    sampling: Sampling = field(default_factory=Poisson)
    noise_stages: Stages = CONSTANT
    clip_stages: Stages = CONSTANT
    correlated: Banded | None = None
    """Noise of which later steps take a part back; its coefficients are settled here, and lots are drawn to fit."""
    metrics: tuple[Metric, ...] = ()
    """Numbers of the private examples that every step releases with noise of their own, such as the loss."""
    preparation: tuple[Event, ...] = ()
    """What was already released about the same units to prepare the run, such as a private projection."""
    unit: Unit = _FOUND_BY_THE_PLAN
    """What is protected: one example, or one person where `people` are drawn. A label does not change it."""
    seed: int | None = None
    """For tests: makes lots and noise reproducible, and stamps the event so."""

    def __post_init__(self) -> None:
        settle = object.__setattr__
        settle(self, "unit", self._settled_unit())
        settle(self, "lot", check.whole("lot", self.lot))
        if self.lot > self.population:
            raise check.refuse("lot", self.lot, f"at most {'people' if self.people else 'examples'}={self.population}")
        self._check_kinds()
        self._check_clip()
        settle(self, "preparation", tuple(self.preparation))
        settle(self, "steps", self._settled_steps())
        self._settle_correlated()
        settle(self, "delta", self._settled_delta())
        settle(self, "noise", self._settled_noise())
        if self.seed is not None:
            settle(self, "seed", check.whole("seed", self.seed, at_least=0))
        self._warn(0.0 if self.budget is None else self.budget.epsilon)

    @property
    def population(self) -> int:
        """How many units lots are drawn from: people, or examples."""
        found = self.examples if self.people is None else self.people
        assert found is not None
        return found

    @property
    def rate(self) -> float:
        """The probability that a lot holds a given example, or person."""
        return self.lot / self.population

    @cached_property
    def rule(self) -> ClippingRule | Adaptive:
        """The clipping rule; a number stands for a flat bound."""
        return Flat(self.clip) if isinstance(self.clip, int | float) else self.clip

    @property
    def first_bound(self) -> float:
        """How long one example's clipped gradient can be at the first step."""
        start = self.rule.initial if isinstance(self.rule, Adaptive) else self.rule.bound
        return start * self.clip_stages.factors[0]

    @property
    def private(self) -> bool:
        """Whether the run has any noise; a plan without is for comparison, and its event says so."""
        return self.noise > 0

    @cached_property
    def event(self) -> Event:
        """What the whole run does to the data."""
        return self.event_after(self.steps)

    @cached_property
    def epsilon(self) -> float:
        """The certified epsilon of the whole run at `delta`; infinite without noise."""
        return self.epsilon_after(self.steps)

    def event_after(self, steps: int) -> Event:
        """What the first `steps` steps do to the data, with what prepared them.

        Raises:
            InvalidArgument: the plan has fewer steps.
        """
        if check.whole("steps", steps, at_least=0) > self.steps:
            raise check.refuse("steps", steps, f"at most the plan's {self.steps}")
        return self._event(self.noise, steps)

    def epsilon_after(self, steps: int) -> float:
        """The certified epsilon of the first `steps` steps; infinite without noise."""
        if not self.private:
            return math.inf
        proven = accounting.epsilon(self.event_after(steps), delta=self.delta)
        if self.budget is None:
            self._warn(proven)
        return proven

    def noise_at(self, step: int) -> float:
        """The noise of one step, relative to what one example can move."""
        return self.noise * self.noise_stages.at(step, self.steps)

    def clip_at(self, step: int, bound: float) -> ClippingRule:
        """The clipping rule of one step; `bound` is the present one where it adapts."""
        if isinstance(self.rule, Adaptive):
            return Flat(bound)
        factor = self.clip_stages.at(step, self.steps)
        return self.rule if factor == 1.0 else Flat(self.rule.bound * factor)

    def deviation_at(self, step: int, bound: float) -> float:
        """The standard deviation of the noise on the clipped sum, where one example adds at most `bound`."""
        noise = self.noise_at(step)
        return noise * self.sampling.reach * bound if noise > 0 else 0.0

    @property
    def _said(self) -> Unit | None:
        """The unit as events have it: one example is what they mean without a word."""
        return None if self.unit is Unit.EXAMPLE else self.unit

    def _event(self, noise: float, steps: int) -> Event:
        if noise == 0:
            return NonPrivate(unit=self._said)
        parts: list[Event] = [*self.preparation]
        if steps:
            parts.append(self.sampling.event(self._stages(noise, steps), examples=self.population, lot=self.lot))
        whole = parts[0] if len(parts) == 1 else Composed(parts)
        return whole if self.seed is None else Reproducible(whole)

    def _stages(self, noise: float, steps: int) -> list[Stage]:
        """The run as stretches of equal steps."""
        parts = len(self.noise_stages.factors)
        edges = [min(-(-k * self.steps // parts), steps) for k in range(parts + 1)]
        lengths = [later - sooner for sooner, later in itertools.pairwise(edges)]
        scaled = [noise * factor for factor in self.noise_stages.factors]
        return [(self._release(one), one, length) for one, length in zip(scaled, lengths, strict=True) if length]

    def _release(self, noise: float) -> Event:
        multipliers = [noise, *(metric.noise_for(self.lot) for metric in self.metrics)]
        if isinstance(self.rule, Adaptive):
            multipliers.append(self.rule.count_noise(self.lot))
        parts = [Gaussian(noise=multiplier, unit=self._said) for multiplier in multipliers]
        return parts[0] if len(parts) == 1 else Composed(parts)

    def _check_kinds(self) -> None:
        """Other kinds of values would be found out later, by errors that say nothing."""
        sampling = self.sampling
        if isinstance(sampling, type) or not all(hasattr(sampling, name) for name in _SAMPLING):
            raise check.refuse("sampling", sampling, "a way of drawing lots, such as sgd.Poisson()")
        for name, stages in (("noise_stages", self.noise_stages), ("clip_stages", self.clip_stages)):
            if not isinstance(stages, Stages):
                raise check.refuse(name, stages, "sgd.Stages(...)")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise check.refuse("budget", self.budget, "Budget(epsilon, delta)")
        metrics = (self.metrics,) if isinstance(self.metrics, Metric) else self.metrics
        if not isinstance(metrics, tuple | list) or not all(isinstance(metric, Metric) for metric in metrics):
            raise check.refuse("metrics", metrics, "a tuple of sgd.Metric(...)")
        if len({metric.name for metric in metrics}) < len(metrics):
            raise check.refuse("metrics", [metric.name for metric in metrics], "a name of its own for each")
        object.__setattr__(self, "metrics", tuple(metrics))
        given = self.preparation
        if not isinstance(given, tuple | list) or not all(isinstance(one, Event) for one in given):
            raise check.refuse("preparation", given, "a tuple of events, such as (projection.event,)")
        if strange := [one for one in given if settled_unit(one) is not self.unit]:
            found = settled_unit(strange[0]).value
            raise InvalidArgument(f"preparation: protects one {found}; want one {self.unit.value}, as the plan")

    def _settled_unit(self) -> Unit:
        """What the plan protects, by what it draws."""
        if (self.people is None) == (self.examples is None):
            raise InvalidArgument("Plan: want examples=, or people= and rows_per_person=")
        name = "examples" if self.people is None else "people"
        object.__setattr__(self, name, check.whole(name, self.population))
        drawn = Unit.EXAMPLE if self.people is None else Unit.PERSON
        if not _left_out(self.unit) and self.unit is not drawn:
            hint = "with examples=, lots are drawn and clipped row by row; people= and rows_per_person= protect people"
            raise check.refuse("unit", self.unit, f"one {drawn.value}, Unit.{drawn.name} or nothing", hint)
        if (self.people is None) != (self.rows_per_person is None):
            raise InvalidArgument("Plan: want people= and rows_per_person= together; examples= has neither")
        if self.rows_per_person is not None:
            object.__setattr__(self, "rows_per_person", check.whole("rows_per_person", self.rows_per_person))
        return drawn

    def _settle_correlated(self) -> None:
        """Coefficients for the steps, and lots in which an example's turns are as far apart as the bands are wide."""
        banded, settle = self.correlated, object.__setattr__
        if not isinstance(banded, Banded | None):
            raise check.refuse("correlated", banded, "sgd.Banded(bands=...)")
        bands = 1 if banded is None else banded.bands
        changing = {"noise_stages": self.noise_stages != CONSTANT, "clip_stages": self.clip_stages != CONSTANT}
        changing["clip"], changing["metrics"] = isinstance(self.rule, Adaptive), bool(self.metrics)
        for name in (name for name, changes in changing.items() if changes and bands > 1):
            hint = "a step takes back noise of the steps before, which must be of its own scale"
            raise check.refuse(name, getattr(self, name), f"one scale for all steps beside {bands} bands", hint)
        settle(self, "sampling", separated(self.sampling, bands, examples=self.population, lot=self.lot))
        settle(self, "correlated", None if banded is None else banded.settled(self.steps))

    def _warn(self, epsilon: float) -> None:
        """Say aloud that a guarantee holds and means little."""
        if self.private and (words := check.weakness(epsilon, self.delta, units=self.population)):
            warnings.warn(f"a weak guarantee: {words}", WeakGuarantee, stacklevel=4)

    def _check_clip(self) -> None:
        clip, is_rule = self.clip, hasattr(self.clip, "factors") and hasattr(self.clip, "bound")
        if self.clip_stages != CONSTANT and (isinstance(clip, Adaptive) or (is_rule and not isinstance(clip, Flat))):
            raise check.refuse("clip_stages", self.clip_stages, "none beside this clipping rule")
        if not is_rule and not isinstance(clip, Adaptive):
            check.number("clip", clip, "a number, or a clipping rule such as sgd.PerLayer")
        if math.isfinite(self.first_bound):
            for factor in self.clip_stages.factors:
                check.moderate("clip", self.first_bound / self.clip_stages.factors[0] * factor)

    def _settled_steps(self) -> int:
        planned = None
        if self.epochs is not None:
            epochs = check.positive("epochs", self.epochs)
            planned = self.sampling.steps(epochs, examples=self.population, lot=self.lot)
        if _left_out(self.steps):
            if planned is None:
                raise InvalidArgument("Plan: want epochs= or steps=")
            return planned
        steps = check.whole("steps", self.steps)
        if planned is not None and planned != steps:
            raise InvalidArgument(f"steps={steps}, epochs={self.epochs} (which is {planned} steps): want one of them")
        return steps

    def _settled_delta(self) -> float:
        if self.budget is None:
            if _left_out(self.noise) or _left_out(self.delta):
                raise InvalidArgument("Plan: want budget=Budget(epsilon, delta), or noise= and delta=")
            return check.open_unit("delta", self.delta)
        if not _left_out(self.delta) and self.delta != self.budget.delta:
            raise InvalidArgument(f"delta={self.delta}, budget.delta={self.budget.delta}: want one of them")
        return check.open_unit("delta", self.budget.delta, "Gaussian noise cannot keep delta 0")

    def _settled_noise(self) -> float:
        if not _left_out(self.noise):
            noise = check.not_negative("noise", self.noise, "terrine.accounting.calibrate chooses it")
            for factor in self.noise_stages.factors if noise else ():
                check.moderate("noise", noise * factor)
            self._check_given(noise)
            return noise
        assert self.budget is not None
        if not math.isfinite(self.first_bound):
            raise check.refuse("clip", math.inf, "a finite bound", "no noise covers an unbounded gradient")
        return accounting.calibrate(lambda noise: self._event(noise, self.steps), self.budget)

    def _check_given(self, noise: float) -> None:
        if noise > 0 and not math.isfinite(self.first_bound):
            raise check.refuse("clip", math.inf, "a finite bound", "no noise covers an unbounded gradient")
        if noise == 0:
            logger.warning("noise=0: this plan is NOT private; its event is NonPrivate and its epsilon infinite")
        if self.budget is None:
            return
        if noise == 0 or accounting.delta(self._event(noise, self.steps), epsilon=self.budget.epsilon) > self.delta:
            raise BudgetExceeded(
                f"noise={noise}: costs more than epsilon={self.budget.epsilon}, delta={self.delta}; "
                "leave noise out and the plan chooses it"
            )


def _left_out(value: Any) -> bool:
    return value is None
