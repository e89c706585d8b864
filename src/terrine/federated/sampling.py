"""Who takes part in which round, and what a run of rounds then costs: one value makes both.

    PoissonClients         every client is drawn for each round independently
    sgd.CyclicPoisson(g)   clients are in g groups for good; round t draws from group t mod g
    sgd.FixedOrder()       one random order, the same in every pass over the clients
    MinimumSeparation(s)   whoever checks in, but nobody twice in s rounds: for servers that cannot sample

Amplification by sampling is claimed for the first two. The others cost one Gaussian of noise / sqrt(k) for k turns.
With noise correlated by b bands a client's turns must be at least b rounds apart: then the columns of C that they go
through have no row in common, whatever the turns were chosen by (see `sgd.correlated`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events import Event, Gaussian, Neighbours, PoissonSampled, Repeated

if TYPE_CHECKING:
    Sampling = "PoissonClients | MinimumSeparation | CyclicPoisson | FixedOrder"

Stage = tuple[Event, float, int]
"""What a round releases, its noise, and for how many rounds in a row, as `sgd.sampling` has it."""

_WANTED = "federated.PoissonClients(), federated.MinimumSeparation(s), sgd.CyclicPoisson(g) or sgd.FixedOrder(...)"


@dataclass(frozen=True)
class PoissonClients:
    """Every client is drawn for each round independently, with the same probability."""

    @property
    def reach(self) -> float:
        """How far one client moves a sum, in clipping bounds."""
        return 1.0

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        """What the rounds cost, of which each draws `lot` of `examples` clients on average."""
        ((release, _, rounds),) = stages
        return Repeated(PoissonSampled(release, rate=lot / examples), times=rounds)


@dataclass(frozen=True)
class MinimumSeparation:
    """At most `per_round` of the clients that check in, nobody again within `rounds` rounds.

    A client has at most ceil(plan's rounds / `rounds`) turns, or `turns` where that is less. Who checks in, and when,
    is not the server's doing, so no amplification is claimed. Neighbours: one client contributes, or sends zeros.
    """

    rounds: int
    turns: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", check.whole("rounds", self.rounds))
        if self.turns is not None:
            object.__setattr__(self, "turns", check.whole("turns", self.turns))

    @property
    def reach(self) -> float:
        """How far one client moves a sum, in clipping bounds."""
        return 1.0

    def event(self, stages: Sequence[Stage], *, examples: int, lot: int) -> Event:
        """What the rounds cost: all turns of one client."""
        ((release, _, rounds),) = stages
        return _in_turns(release, turns(self, rounds, clients=examples, per_round=lot), Neighbours.ZERO_OUT)


def turns(sampling: Any, rounds: int, *, clients: int, per_round: int) -> int:
    """In how many of `rounds` rounds one client takes part at most."""
    found = math.ceil(rounds / apart(sampling, clients, per_round))
    limit = getattr(sampling, "turns", None)
    return found if limit is None else min(found, limit)


def apart(sampling: Any, clients: int, per_round: int) -> int:
    """How many rounds lie from one turn of a client to the next, at least."""
    if isinstance(sampling, PoissonClients):
        return 1
    if isinstance(sampling, MinimumSeparation):
        return sampling.rounds
    return int(sampling.groups) if hasattr(sampling, "groups") else math.ceil(clients / per_round)


def cost(sampling: Any, release: Event, noise: float, rounds: int, *, clients: int, per_round: int) -> Event:
    """What `rounds` rounds cost, of which one costs a client who takes part `release`."""
    if hasattr(sampling, "neighbours") and not isinstance(release, Gaussian):
        return _in_turns(release, turns(sampling, rounds, clients=clients, per_round=per_round), sampling.neighbours)
    found: Event = sampling.event([(release, noise, rounds)], examples=clients, lot=per_round)
    return found


def settled(sampling: Any, bands: int, *, clients: int, per_round: int, shares: bool) -> Any:
    """`sampling`, with the turns of a client at least `bands` rounds apart.

    Raises:
        InvalidArgument: it is no way of drawing clients, or cannot keep them so far apart.
    """
    if type(sampling) not in (PoissonClients, MinimumSeparation):
        sampling = _of_lots(sampling, shares)
    if bands > 1 and isinstance(sampling, PoissonClients):
        from terrine.sgd import CyclicPoisson

        sampling = CyclicPoisson(bands)
    groups = getattr(sampling, "groups", 1)
    if groups * per_round > clients:
        hint = f"a round draws from one of the groups: at most clients / per_round = {clients // per_round}"
        raise check.refuse("bands" if bands == groups else "groups", groups, "fewer", hint)
    if (found := apart(sampling, clients, per_round)) < bands:
        hint = f"{type(sampling).__name__} lets a client take part again after {found} rounds"
        raise check.refuse("bands", bands, f"at most {found}", hint)
    return sampling


def _of_lots(sampling: Any, shares: bool) -> Any:
    """One of those of `sgd`, whose lots are of clients here."""
    from terrine import sgd

    if type(sampling) is sgd.Poisson:
        return PoissonClients()
    if type(sampling) not in (sgd.CyclicPoisson, sgd.FixedOrder):
        raise check.refuse("sampling", sampling, _WANTED)
    if shares and sampling.reach != 1.0:
        raise InvalidArgument(
            f"sampling={sampling}: shares of noise are for one client that contributes or sends zeros; want "
            "sgd.FixedOrder(Neighbours.ZERO_OUT)"
        )
    return sampling


def _in_turns(release: Any, count: int, neighbours: Neighbours) -> Event:
    """`count` releases that one client takes part in: of Gaussians, one of noise / sqrt(count)."""
    if isinstance(release, Gaussian):
        noise = release.noise if count == 1 else release.noise / math.sqrt(count) * (1 - 2**-50)
        return replace(release, noise=noise, neighbours=neighbours)
    return Repeated(replace(release, neighbours=neighbours), times=count)
