"""The whole protocol in one process: every client and the server, message by message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from terrine import check
from terrine.errors import InvalidArgument
from terrine.federated import quantise
from terrine.federated.keyed import stretched
from terrine.federated.plan import Plan
from terrine.federated.quantise import Floats, Quantiser
from terrine.federated.secure import keys
from terrine.federated.secure.client import Client
from terrine.federated.secure.keys import Identity
from terrine.federated.secure.rounds import Round
from terrine.federated.secure.server import Server
from terrine.federated.sums import Central
from terrine.mechanisms import exact
from terrine.rng import SYSTEM, Seeded, Source

_FEW = 32
"""Entries of which quartiles say little."""


@dataclass(frozen=True)
class OpenedSum:
    """A noisy sum, and what may be said about it."""

    value: Floats
    survivors: int
    """How many shares of noise it holds."""
    wrapped: float
    """About how many entries wrapped around: a loss of accuracy, estimated from the sum itself."""


def sum(vectors: Sequence[ArrayLike], plan: Plan, *, drop: Iterable[int] = (), rng: Source | None = None) -> Floats:
    """The noisy sum of clients' vectors, each clipped, by the full protocol.

    Clients in `drop` fall silent after the keys were exchanged; the sum is then that of the others.

    Raises:
        TooFewSurvivors: fewer shares of noise are left than the plan's `survivors`; nothing is opened.
        InvalidArgument: not vectors of one length, or a plan whose sums are not made of shares.
    """
    return opened(vectors, plan, drop=drop, rng=rng).value


def opened(
    vectors: Sequence[ArrayLike],
    plan: Plan,
    *,
    drop: Iterable[int] = (),
    drop_late: Iterable[int] = (),
    rng: Source | None = None,
) -> OpenedSum:
    """The same, with what may be said about it; those of `drop_late` send their vector, and are then silent."""
    if not isinstance(plan, Plan):
        raise check.refuse("plan", plan, "federated.Plan(...)")
    if isinstance(plan.sums, Central):
        raise InvalidArgument("plan.sums=Central(): want shares of noise, federated.Skellam or DiscreteGaussian")
    source: Source = (SYSTEM if plan.seed is None else Seeded(plan.seed)) if rng is None else rng
    if not all(hasattr(source, name) for name in ("word", "words", "reproducible")):
        raise check.refuse("rng", rng, "a source of random words, such as terrine.rng.SYSTEM, or nothing")
    given = check.listed("vectors", vectors, "a list of vectors, one for every client")
    first = quantise.checked(given[0]) if given else np.zeros(1)
    listed = [quantise.checked(one, len(first)) for one in given]
    if len(listed) > plan.clients:
        raise InvalidArgument(f"{len(listed)} vectors: want at most the plan's clients={plan.clients}")
    gone, late = _indices("drop", drop, len(listed)), _indices("drop_late", drop_late, len(listed))
    quantiser = Quantiser(len(first), plan.bound, plan.reach, source.word() >> 1)
    givers = exact.order(len(listed), source)[: plan.per_round]
    return opened_round(listed, plan, quantiser, frozenset(givers), gone, late, source)


def opened_round(
    vectors: Sequence[Floats],
    plan: Plan,
    quantiser: Quantiser,
    givers: frozenset[int],
    gone: set[int],
    late: set[int],
    rng: Source,
) -> OpenedSum:
    """One round with these vectors, noise givers and dropouts.

    Raises:
        TooFewSurvivors: nothing is opened.
    """
    assert not isinstance(plan.sums, Central)
    round_ = Round(
        name=rng.words(4).tobytes(),
        clients=len(vectors),
        givers=givers,
        survivors=plan.sums.survivors,
        length=quantiser.length,
        bits=plan.sums.bits,
        seed=rng.word() >> 1,
        colluding=plan.sums.colluding,
    )
    total = _run(round_, quantiser, plan, vectors, gone, late, rng)
    present = len(vectors) - len(gone)
    return OpenedSum(quantiser.to_real(total), len(givers - gone), wraparound(total, plan, present))


def contribution(vector: Floats, quantiser: Quantiser, plan: Plan, *, gives: bool, rng: Source) -> NDArray[np.int64]:
    """What one client puts under its masks: its vector as whole numbers, and its share of the noise."""
    assert not isinstance(plan.sums, Central)
    own = stretched(rng)
    whole = quantiser.to_integers(vector, own)
    return whole + plan.sums.share(quantiser.length, plan.deviation, own) if gives else whole


def wraparound(total: NDArray[np.int64], plan: Plan, present: int) -> float:
    """About how many entries of a sum of `present` contributions wrapped around.

    After the rotation entries are nearly normal; their spread is that of the middle half of them. Few entries show no
    spread: then it is the most that can be, if all contributions were of full length and pointed one way.
    """
    assert not isinstance(plan.sums, Central)
    half, count = 2.0 ** (plan.sums.bits - 1), len(total)
    if count < _FEW:
        noise = plan.deviation * math.sqrt(plan.per_round / plan.sums.honest)
        return float(ndtr((present * plan.reach / math.sqrt(count) - half) / noise) * count)
    low, high = np.quantile(total, [0.25, 0.75])
    spread = max(float(high - low) / 1.349, 1e-9)
    return float(2 * ndtr(-half / spread) * count)


def _run(
    round_: Round,
    quantiser: Quantiser,
    plan: Plan,
    vectors: Sequence[Floats],
    gone: set[int],
    late: set[int],
    rng: Source,
) -> NDArray[np.int64]:
    identities = [Identity(keys.secret(rng)) for _ in vectors]
    known = {index: one.public for index, one in enumerate(identities)}
    clients = [Client(index, round_, one, known, rng=rng) for index, one in enumerate(identities)]
    server = Server(round_)
    server.advertised(one.advertise() for one in clients)
    server.shared({one.index: one.share(server.keys_for(one.index)) for one in clients})
    alive = [one for one in clients if one.index not in gone]
    server.demand(one.index for one in alive)  # nobody need send what nobody may open
    for one in alive:
        gives = one.index in round_.givers
        values = contribution(vectors[one.index], quantiser, plan, gives=gives, rng=rng)
        server.add(one.index, one.mask(values, server.shares_for(one.index)))
    survivors = server.survivors
    signatures = {one.index: one.agree(survivors) for one in alive if one.index not in late}
    return server.open(one.unmask(survivors, signatures) for one in alive if one.index not in late)


def _indices(name: str, given: Iterable[int], count: int) -> set[int]:
    listed = check.listed(name, given, "a list of indices")
    found = {check.whole(name, one, at_least=0) for one in listed}
    if found and max(found) >= count:
        raise check.refuse(name, max(found), f"indices of the {count} vectors")
    return found
