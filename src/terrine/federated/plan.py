"""The plan of a federated run: the one value that clients' sampling, clipping, noise and event all come from.

A round, with rate q = per_round / clients, every client's contribution clipped to C in l2, equal weights:

    update = ( sum over clients drawn with probability q of clip(x_i, C)  +  noise ) / per_round

Neighbours: one client contributes, or sends zeros. `clients` is public. The noise must not tell who was drawn, so a
round with shares of noise always has `per_round` noise givers: if fewer clients are drawn, others stand in and send
noise alone; if more are, the rest send no noise. Other ways of choosing clients, and the noise that goes with them,
are in `sampling`; noise of which later rounds take a part back (`correlated`) is made by a trusted server alone.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from terrine import accounting, check
from terrine.accounting import Bounds
from terrine.accounting.calibration import Search
from terrine.accounting.integer_noise import reduced
from terrine.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent, WeakGuarantee
from terrine.events import Budget, Event, Gaussian, Repeated, Reproducible, Unit
from terrine.federated import sampling
from terrine.federated.sampling import MinimumSeparation, PoissonClients
from terrine.federated.sums import Central, DiscreteGaussian, Skellam

if TYPE_CHECKING:
    from terrine.sgd import Banded, CyclicPoisson, FixedOrder

_FOUND_BY_THE_PLAN: Any = None
_LONGEST = 2**32
_NOISE = Search(low=0.05, high=1e4, start=1.0, private_end_is_high=True)


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
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
            object.__setattr__(self, name, check.moderate(name, getattr(self, name)))
        object.__setattr__(self, "quantile", check.open_unit("quantile", self.quantile))

    def following(self, bound: float, share: float) -> float:
        """The next bound, after a noisy `share` of the clients was within the present one."""
        exponent = -self.learning_rate * (min(max(share, 0.0), 1.0) - self.quantile)
        least, most = check.MODERATE
        return min(max(bound * math.exp(min(max(exponent, -100.0), 100.0)), least), most)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a federated run will do, decided before any client is asked.

    Give either `budget` (the noise is then the least that keeps it), or `noise` and `delta`. `noise` is relative to
    what one client can move. `dimension`, if known, gives whole numbers a finer grid for the same bits. `correlated`
    wants sums by a trusted server and turns of a client at least so many rounds apart as it has bands: `PoissonClients`
    then becomes `sgd.CyclicPoisson(bands)`, `sgd.FixedOrder` and `MinimumSeparation` are kept if they are wide enough.

    Guarantee: a run made from this plan costs at most `plan.event`, priced as (`plan.epsilon`, `plan.delta`), for
    whoever sees what is released and does not know who took part in which round; who knows: `plan.insider_epsilon`.

    Raises:
        InvalidArgument: a field is out of range, or two fields contradict each other.
        BudgetExceeded: no noise keeps the budget, or the given noise does not.
    """

    clients: int
    per_round: int
    rounds: int
    clip: float | AdaptiveClipping
    budget: Budget | None = None
    sums: Central | Skellam | DiscreteGaussian = field(default_factory=Central)
    noise: float = _FOUND_BY_THE_PLAN
    delta: float = _FOUND_BY_THE_PLAN
    dimension: int | None = None
    sampling: PoissonClients | MinimumSeparation | CyclicPoisson | FixedOrder = field(default_factory=PoissonClients)
    correlated: Banded | None = None
    """Noise of which later rounds take a part back; its coefficients are settled here."""
    seed: int | None = None
    """For tests: makes clients, noise and masks reproducible, and stamps the event so."""

    def __post_init__(self) -> None:
        settle = object.__setattr__
        for name in ("clients", "per_round", "rounds"):
            settle(self, name, check.whole(name, getattr(self, name)))
        if self.per_round > self.clients:
            raise check.refuse("per_round", self.per_round, f"at most clients={self.clients}")
        if not isinstance(self.clip, AdaptiveClipping):
            settle(self, "clip", check.moderate("clip", self.clip, "or federated.AdaptiveClipping(...)"))
        self._check_kinds()
        self.sums.check(self.per_round)
        self._settle_correlated()
        settle(self, "delta", self._settled_delta())
        settle(self, "noise", self._settled_noise())
        if words := check.weakness(self.epsilon, self.delta, units=self.clients):
            warnings.warn(f"a weak guarantee: {words}", WeakGuarantee, stacklevel=3)

    @property
    def rate(self) -> float:
        """The share of the clients that a round has on average."""
        return self.per_round / self.clients

    @property
    def bands(self) -> int:
        """How many bands the noise is correlated by; 1 where it is independent."""
        return 1 if self.correlated is None else self.correlated.bands

    @property
    def turns(self) -> int:
        """In how many rounds one client takes part at most."""
        return sampling.turns(self.sampling, self.rounds, clients=self.clients, per_round=self.per_round)

    @property
    def by_round(self) -> bool:
        """Whether rounds may be charged one by one: their noise is independent, and so is who is drawn."""
        return self.bands == 1 and isinstance(self.sampling, PoissonClients)

    @property
    def bound(self) -> float:
        """The largest l2 norm of what one client contributes; relative to the clipping bound where that adapts."""
        if isinstance(self.clip, AdaptiveClipping):
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
        return self.noise * (self.reach or self.bound * self.sampling.reach)

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

        A client is taken to have all of its turns; fewer cost less.
        """
        if not isinstance(self.sampling, PoissonClients) and not hasattr(self.sampling, "groups"):
            return self.event  # where nothing is sampled, nothing is hidden
        return self._stamped(Repeated(self.sums.event(self.noise, self.per_round, self.dimension), times=self.turns))

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
        return self._cost(replace(leaf, **changes), self.rounds)

    def _searched(self, noise: float) -> Event:
        """The run's event at `noise`; where so few grid steps have no proven price, something dearer."""
        try:
            release = self.sums.event(noise, self.per_round, self.dimension)
            reduced(release)
        except (UnsupportedEvent, InvalidArgument):
            release = Gaussian(noise=noise / 100, unit=Unit.CLIENT)
        return self._stamped(self._cost(release, self.rounds))

    def _event(self, noise: float, rounds: int) -> Event:
        return self._stamped(self._cost(self.sums.event(noise, self.per_round, self.dimension), rounds))

    def _cost(self, release: Any, rounds: int) -> Event:
        many = {"clients": self.clients, "per_round": self.per_round}
        return sampling.cost(self.sampling, release, release.noise, rounds, **many)

    def _stamped(self, event: Event) -> Event:
        return event if self.seed is None else Reproducible(event)

    def _check_kinds(self) -> None:
        sums: Any = self.sums
        if type(sums) not in (Central, Skellam, DiscreteGaussian):  # a class of somebody's own may say what it likes
            raise check.refuse("sums", self.sums, "federated.Central(), Skellam(...) or DiscreteGaussian(...)")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise check.refuse("budget", self.budget, "Budget(epsilon, delta)")
        for name, least in (("dimension", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check.whole(name, getattr(self, name), at_least=least))
        if self.dimension is not None and self.dimension > _LONGEST:
            raise check.refuse("dimension", self.dimension, f"at most 2^32 = {_LONGEST} entries")

    def _settle_correlated(self) -> None:
        """Coefficients for the rounds, and turns of a client as far apart as the bands are wide."""
        settle, banded, shares = object.__setattr__, self.correlated, not isinstance(self.sums, Central)
        if banded is not None:
            from terrine.sgd import Banded

            if type(banded) is not Banded:
                raise check.refuse("correlated", banded, "sgd.Banded(bands=...)")
            if shares and banded.bands > 1:
                raise InvalidArgument(
                    f"correlated={check.shown(banded)}: a round takes back noise of rounds before, which nobody knows "
                    "where every client adds a share; want sums=federated.Central(), or no correlated="
                )
            if isinstance(self.clip, AdaptiveClipping) and banded.bands > 1:
                hint = "a round takes back noise of the rounds before, which must be of its own scale"
                raise check.refuse("clip", self.clip, f"one bound for all rounds beside {banded.bands} bands", hint)
            settle(self, "correlated", banded.settled(self.rounds))
        many: dict[str, Any] = {"clients": self.clients, "per_round": self.per_round, "shares": shares}
        settle(self, "sampling", sampling.settled(self.sampling, self.bands, **many))

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
