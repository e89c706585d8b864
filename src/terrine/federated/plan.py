"""The plan of a federated run: the one value that clients' sampling, clipping, noise and event all come from.

A round, with rate q = per_round / clients, every client's contribution clipped to C in l2, equal weights:

    update = ( sum over clients drawn with probability q of clip(x_i, C)  +  noise ) / per_round

Neighbours: one client contributes, or sends zeros. `clients` is public. The noise must not tell who was drawn, so a
round with shares of noise always has `per_round` noise givers: if fewer clients are drawn, others stand in and send
noise alone; if more are, the rest send no noise.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from terrine import accounting, check
from terrine.accounting import Bounds
from terrine.accounting.calibration import Search
from terrine.accounting.integer_noise import reduced
from terrine.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent, WeakGuarantee
from terrine.events import Budget, Event, Gaussian, PoissonSampled, Repeated, Reproducible, Unit
from terrine.federated.sums import Central, DiscreteGaussian, Skellam

_FOUND_BY_THE_PLAN: Any = None
_NOISE = Search(low=0.05, high=1e4, start=1.0, private_end_is_high=True)


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A bound that follows a quantile of the clients' norms: C <- C exp(-learning_rate (b - quantile)). [ATMR21]

    b is the noisy share of clients whose norm was at most C. It rides along with the update as one more entry, of
    weight `weight`, and is paid for with it: what is clipped, noised and billed is (x / C, weight (bit - 1/2)).
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    weight: float = 0.2

    def __post_init__(self) -> None:
        for name in ("initial", "learning_rate", "weight"):
            object.__setattr__(self, name, check.positive(name, getattr(self, name)))
        object.__setattr__(self, "quantile", check.open_unit("quantile", self.quantile))

    def following(self, bound: float, share: float) -> float:
        """The next bound, after a noisy `share` of the clients was within the present one."""
        exponent = -self.learning_rate * (min(max(share, 0.0), 1.0) - self.quantile)
        return min(max(bound * math.exp(exponent), 1e-12), 1e12)


class Sampling(Protocol):
    """How clients are drawn, and what a run of rounds then costs: the seam for correlated noise of bands."""

    def event(self, release: Event, *, rate: float, rounds: int) -> Event:
        """What `rounds` rounds cost, of which one release costs a client who takes part `release`."""


@dataclass(frozen=True)
class Poisson:
    """Every client is drawn for each round independently, with the same probability."""

    def event(self, release: Event, *, rate: float, rounds: int) -> Event:
        return Repeated(PoissonSampled(release, rate=rate), times=rounds)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a federated run will do, decided before any client is asked.

    Give either `budget` (the noise is then the least that keeps it), or `noise` and `delta`. `noise` is relative to
    what one client can move. `dimension`, if known, gives whole numbers a finer grid for the same bits.

    Guarantee: a run made from this plan costs at most `plan.event`, priced as (`plan.epsilon`, `plan.delta`), for
    whoever sees what is released and does not know who took part in which round; who knows: `plan.insider_epsilon`.

    Raises:
        InvalidArgument: a field is out of range, or two fields contradict each other.
        BudgetExceeded: no noise keeps the budget, or the given noise does not.
    """

    clients: int
    per_round: int
    rounds: int
    clip: float | Adaptive
    budget: Budget | None = None
    sums: Central | Skellam | DiscreteGaussian = field(default_factory=Central)
    noise: float = _FOUND_BY_THE_PLAN
    delta: float = _FOUND_BY_THE_PLAN
    dimension: int | None = None
    sampling: Sampling = field(default_factory=Poisson)
    seed: int | None = None
    """For tests: makes clients, noise and masks reproducible, and stamps the event so."""

    def __post_init__(self) -> None:
        settle = object.__setattr__
        for name in ("clients", "per_round", "rounds"):
            settle(self, name, check.whole(name, getattr(self, name)))
        if self.per_round > self.clients:
            raise check.refuse("per_round", self.per_round, f"at most clients={self.clients}")
        if not isinstance(self.clip, Adaptive):
            settle(self, "clip", check.positive("clip", self.clip, "or federated.Adaptive(...)"))
        self._check_kinds()
        self.sums.check(self.per_round)
        settle(self, "delta", self._settled_delta())
        settle(self, "noise", self._settled_noise())
        if words := check.weakness(self.epsilon, self.delta, units=self.clients):
            warnings.warn(f"a weak guarantee: {words}", WeakGuarantee, stacklevel=3)

    @property
    def rate(self) -> float:
        """The probability that a given client is drawn for a round."""
        return self.per_round / self.clients

    @property
    def bound(self) -> float:
        """The largest l2 norm of what one client contributes; relative to the clipping bound where that adapts."""
        if isinstance(self.clip, Adaptive):
            return math.hypot(1.0, self.clip.weight / 2) * (1 + 1e-12)
        return self.clip

    @cached_property
    def reach(self) -> float:
        """The same in grid steps, after rounding; 0 where there is no grid."""
        if isinstance(self.sums, Central):
            return 0.0
        return self.sums.reach(self.noise, self.per_round, self.dimension)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise that is billed: in grid steps, or for a central server in real ones."""
        return self.noise * (self.reach or self.bound)

    @cached_property
    def event(self) -> Event:
        """What the whole run does to the clients' data."""
        return self.event_after(self.rounds)

    @cached_property
    def epsilon(self) -> float:
        """The certified epsilon of the whole run at `delta`."""
        return accounting.epsilon(self.event, delta=self.delta)

    @cached_property
    def insider_event(self) -> Event:
        """The same for those who know who takes part in each round, such as the server: sampling hides nothing then.

        A client is taken to be part of every round; fewer cost less.
        """
        return self._stamped(Repeated(self.sums.event(self.noise, self.per_round, self.dimension), times=self.rounds))

    @cached_property
    def insider_epsilon(self) -> float:
        """The certified epsilon of `insider_event` at `delta`."""
        return accounting.epsilon(self.insider_event, delta=self.delta)

    def event_after(self, rounds: int) -> Event:
        """What the first `rounds` rounds do.

        Raises:
            InvalidArgument: none, or more than the plan has.
        """
        if not 1 <= check.whole("rounds", rounds) <= self.rounds:
            raise check.refuse("rounds", rounds, f"at most the plan's {self.rounds}")
        return self._event(self.noise, rounds)

    @cached_property
    def round_event(self) -> Event:
        """What one round does."""
        return self.event_after(1)

    def dropouts(self) -> dict[int, Bounds]:
        """For every number of survivors that a round accepts, what the run costs if all rounds have as many.

        More survivors add more noise. Both bounds on epsilon are proven; a central server's noise does not depend on
        survivors, and has one entry.
        """
        if isinstance(self.sums, Central):
            return {0: accounting.bounds(self.event, delta=self.delta)}
        found = {}
        for survivors in range(self.sums.survivors, self.per_round + 1):
            more = math.sqrt((survivors - self.sums.colluding) / self.sums.honest)
            event = self._widened(more * (1 - 1e-15), survivors)
            found[survivors] = accounting.bounds(event, delta=self.delta)
        return found

    def _widened(self, factor: float, survivors: int) -> Event:
        leaf: Any = self.sums.event(self.noise, self.per_round, self.dimension)
        changes: dict[str, Any] = {"noise": self.noise * factor}
        if isinstance(self.sums, DiscreteGaussian):
            changes["shares"] = survivors - self.sums.colluding
        return self.sampling.event(replace(leaf, **changes), rate=self.rate, rounds=self.rounds)

    def _searched(self, noise: float) -> Event:
        """The run's event at `noise`; where so few grid steps have no proven price, something dearer."""
        try:
            release = self.sums.event(noise, self.per_round, self.dimension)
            reduced(release)
        except (UnsupportedEvent, InvalidArgument):
            release = Gaussian(noise=noise / 100, unit=Unit.CLIENT)
        return self._stamped(self.sampling.event(release, rate=self.rate, rounds=self.rounds))

    def _event(self, noise: float, rounds: int) -> Event:
        release = self.sums.event(noise, self.per_round, self.dimension)
        return self._stamped(self.sampling.event(release, rate=self.rate, rounds=rounds))

    def _stamped(self, event: Event) -> Event:
        return event if self.seed is None else Reproducible(event)

    def _check_kinds(self) -> None:
        sums: Any = self.sums
        if not isinstance(sums, Central | Skellam | DiscreteGaussian):
            raise check.refuse("sums", self.sums, "federated.Central(), Skellam(...) or DiscreteGaussian(...)")
        if isinstance(self.sampling, type) or not hasattr(self.sampling, "event"):
            raise check.refuse("sampling", self.sampling, "a way of drawing clients, such as federated.Poisson()")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise check.refuse("budget", self.budget, "Budget(epsilon, delta)")
        for name, least in (("dimension", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check.whole(name, getattr(self, name), at_least=least))

    def _settled_delta(self) -> float:
        if self.budget is None:
            if _left_out(self.noise) or _left_out(self.delta):
                raise InvalidArgument("Plan: want budget=Budget(epsilon, delta), or noise= and delta=")
            return check.open_unit("delta", self.delta)
        if not _left_out(self.delta) and self.delta != self.budget.delta:
            raise InvalidArgument(f"delta={self.delta}, budget.delta={self.budget.delta}: want one of them")
        return check.open_unit("delta", self.budget.delta, "this noise cannot keep delta 0")

    def _settled_noise(self) -> float:
        if _left_out(self.noise):
            assert self.budget is not None
            return float(accounting.calibrate(self._searched, self.budget, over=_NOISE))
        noise = check.positive("noise", self.noise, "leave it out and the plan chooses it")
        if self.budget is not None:
            cost = accounting.delta(self._event(noise, self.rounds), epsilon=self.budget.epsilon)
            if cost > self.delta:
                raise BudgetExceeded(
                    f"noise={noise}: costs more than epsilon={self.budget.epsilon}, delta={self.delta}; "
                    "leave noise out and the plan chooses it"
                )
        return noise


def _left_out(value: Any) -> bool:
    return value is None
