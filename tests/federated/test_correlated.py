"""Correlated noise for clients: the event is the theorem's, turns are as far apart as it wants, and noise cancels."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from terrine import accounting, federated, sgd
from terrine.audit import lower_bound
from terrine.common.keys import Key
from terrine.errors import InvalidArgument
from terrine.events import Budget, Gaussian, Neighbours, PoissonSampled, Repeated, Unit, settled_neighbours
from terrine.federated.drawing import draw
from terrine.rng import Seeded

ASKED = {"clients": 40, "per_round": 4, "rounds": 25, "clip": 1.0, "noise": 2.0, "delta": 1e-3}
ZERO_OUT = sgd.FixedOrder(Neighbours.ZERO_OUT)


def plan(bands=5, **changes):
    return federated.Plan(**ASKED | {"correlated": sgd.Banded(bands)} | changes)


def test_cyclic_groups_cost_one_sample_a_cycle():
    """[CGM23]: ceil(T / b) Poisson samples at b times the rate."""
    found = plan(4)
    assert found.sampling == sgd.CyclicPoisson(4)
    assert found.event == Repeated(PoissonSampled(Gaussian(noise=2.0, unit=Unit.CLIENT), rate=0.4), times=7)
    assert found.insider_event == Repeated(Gaussian(noise=2.0, unit=Unit.CLIENT), times=7)


@pytest.mark.parametrize(
    ("sampling", "turns"),
    [
        (ZERO_OUT, 3),  # ten rounds to an epoch
        (federated.MinimumSeparation(5), 5),
        (federated.MinimumSeparation(7), 4),
        (federated.MinimumSeparation(7, turns=2), 2),
    ],
)
def test_separated_turns_are_one_gaussian(sampling, turns):
    """k turns at least b rounds apart move C g by at most sqrt(k) bounds."""
    found = plan(sampling=sampling)
    assert found.turns == turns
    assert isinstance(found.event, Gaussian)
    assert found.event.noise == pytest.approx(2.0 / math.sqrt(turns), rel=1e-12)
    assert found.event.noise <= 2.0 / math.sqrt(turns)
    assert settled_neighbours(found.event) is Neighbours.ZERO_OUT
    assert found.event.unit is Unit.CLIENT
    assert found.insider_epsilon == found.epsilon


def test_the_most_a_client_can_move_is_what_was_billed():
    """A loop over all ways of taking part: the norm of what it moves in C g."""
    found = plan(3, rounds=12, sampling=federated.MinimumSeparation(3))
    c = np.array(found.correlated.coefficients) / found.correlated.sensitivity
    matrix = sum(np.diag(np.full(12 - k, one), -k) for k, one in enumerate(c))
    rng, largest = np.random.default_rng(0), 0.0
    for start in range(3):
        for steps in ([3] * 4, [3, 4, 3], [5, 3]):
            at = np.cumsum([start, *steps])
            at = at[at < 12]
            moved = matrix[:, at] @ rng.choice([-1.0, 1.0], size=(len(at), 1))
            largest = max(largest, float(np.linalg.norm(moved)))
    assert largest <= math.sqrt(found.turns) + 1e-9
    close = np.linalg.norm(matrix[:, [4, 5, 6]].sum(axis=1))  # a mutant: in each of three rounds in a row
    assert close > math.sqrt(3) * 1.2


def test_a_budget_is_spent_and_no_more():
    found = plan(noise=None, delta=None, budget=Budget(3.0, 1e-3), sampling=ZERO_OUT)
    assert 2.99 < found.epsilon <= 3.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampling": federated.MinimumSeparation(4)}, "at most 4; MinimumSeparation"),
        ({"sampling": ZERO_OUT, "per_round": 10}, "at most 4; FixedOrder"),
        ({"sampling": sgd.CyclicPoisson(4)}, "at most 4; CyclicPoisson"),
        ({"per_round": 9}, "clients / per_round = 4"),
        ({"sums": federated.Skellam(survivors=3)}, "Central"),
        ({"sums": federated.DiscreteGaussian(survivors=3)}, "Central"),
        ({"clip": federated.AdaptiveClipping()}, "one bound for all rounds"),
        ({"rounds": 4}, "4 steps"),
        ({"correlated": 5}, "Banded"),
        ({"sampling": sgd.FixedSize()}, "MinimumSeparation"),
        ({"sampling": sgd.Shuffled()}, "MinimumSeparation"),
        ({"sampling": object()}, "MinimumSeparation"),
    ],
)
def test_turns_too_close_for_the_bands_are_refused_in_one_line(changes, why):
    with pytest.raises(InvalidArgument, match=why) as refusal:
        plan(**changes)
    assert "\n" not in str(refusal.value)


def test_shares_want_neighbours_that_send_zeros():
    shares = {"correlated": None, "sums": federated.Skellam(survivors=3)}
    assert plan(**shares, sampling=ZERO_OUT).event.times == 3
    with pytest.raises(InvalidArgument, match="ZERO_OUT"):
        plan(**shares, sampling=sgd.FixedOrder())


def test_one_replaced_by_another_moves_twice_as_much():
    assert plan(sampling=sgd.FixedOrder()).deviation == 2 * plan(sampling=ZERO_OUT).deviation


@pytest.mark.parametrize("sampling", [federated.PoissonClients(), ZERO_OUT, federated.MinimumSeparation(6, turns=3)])
def test_nobody_comes_back_too_soon(sampling):
    found, key, rng, turns, seen = plan(sampling=sampling), Key.seeded(3), Seeded(3), {}, {}
    for round_ in range(found.rounds):
        for one in draw(found, rng, key=key, round_=round_, turns=turns).contributing:
            seen.setdefault(one, []).append(round_)
    assert all(np.diff(rounds).min(initial=99) >= 5 for rounds in seen.values())
    assert max(map(len, seen.values())) <= found.turns
    assert len(seen) > 20


def test_whoever_checks_in_is_asked_if_it_may_be():
    found, turns = plan(2, per_round=3, sampling=federated.MinimumSeparation(2)), {}
    rounds = [draw(found, Seeded(1), round_=k, turns=turns, present=[1, 2]).contributing for k in range(4)]
    assert rounds == [(1, 2), (), (1, 2), ()]
    with pytest.raises(InvalidArgument, match="from 0 to 39"):
        draw(found, Seeded(1), round_=5, turns=turns, present=[40])


# -- training ----------------------------------------------------------------------------------------------------------


def federation(found, present=None, outputs=2, **changes):
    torch.manual_seed(1)
    clients = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(found.clients)]
    return federated.Federation(nn.Linear(3, outputs), found, clients, present=present, **changes)


def moved(found):
    """What every round added to the weights, where all clients are silent: noise alone."""
    found._silent = frozenset(range(found.plan.clients))
    steps, before = [], torch.cat([one.detach().flatten() for one in found.model.parameters()])
    for _ in range(found.plan.rounds):
        found.round()
        after = torch.cat([one.detach().flatten() for one in found.model.parameters()])
        steps.append((after - before).double().numpy() * found.plan.per_round)
        before = after
    return np.array(steps)


@pytest.mark.parametrize("sampling", [federated.PoissonClients(), ZERO_OUT, federated.MinimumSeparation(5)])
def test_the_noise_is_c_inverse_z(sampling):
    """C times what was released is white, of the deviation that was billed."""
    found = plan(sampling=sampling, rounds=60)
    steps = moved(federation(found, outputs=80))
    c = np.array(found.correlated.coefficients) / found.correlated.sensitivity
    white = sum(one * np.vstack([np.zeros((k, steps.shape[1])), steps[: 60 - k]]) for k, one in enumerate(c))
    assert white.std() == pytest.approx(found.deviation, rel=0.03)
    lagged = [float((white[k:] * white[: 60 - k]).mean()) / found.deviation**2 for k in range(1, 6)]
    assert np.abs(lagged).max() < 0.05
    sums = steps.cumsum(axis=0)[-1].std() / found.deviation
    assert sums < 0.6 * math.sqrt(60)  # and most of it is taken back


def test_turns_stay_apart_through_a_crash(tmp_path, monkeypatch):
    found = plan(3, sampling=federated.MinimumSeparation(3), noise=0.4)
    asked = {"present": lambda round_: range(round_ % 3, 40, 2), "checkpoint": tmp_path / "run"}
    killed = federation(found, **asked)
    for _ in range(11):
        killed.round()
    monkeypatch.setattr(killed, "_step", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        killed.round()
    again = federation(found, **asked)
    assert (again.fit().rounds, again.history.lost) == (25, 1)
    turns = again._progress.turns.values()
    assert sum(map(len, turns)) == 25 * 4
    assert all(later - earlier >= 3 for rounds in turns for earlier, later in pairwise(rounds))


def test_rounds_have_no_price_of_their_own():
    class Account:
        def charge(self, event, *, purpose, by):
            raise AssertionError

    with pytest.raises(InvalidArgument, match="whole plan"):
        federation(plan(), account=Account(), by_round=True)
    with pytest.raises(InvalidArgument, match="draws clients itself"):
        federation(plan(), present=lambda _: [1])


def test_bands_wider_than_the_separation_are_refuted():
    """The mutant: a client in every round under 5 bands, billed as if its turns were 5 rounds apart."""
    found = plan(rounds=10, noise=2.0, sampling=federated.MinimumSeparation(5))
    c = np.array(found.correlated.coefficients) / found.correlated.sensitivity
    matrix = sum(np.diag(np.full(10 - k, one), -k) for k, one in enumerate(c))
    rng = np.random.default_rng(4)

    def seen(at):
        """C x, projected on the direction that the client moves it in: the best statistic there is."""
        direction = matrix[:, at].sum(axis=1)
        length = float(np.linalg.norm(direction))
        return lambda there, count: there * length + rng.normal(scale=found.deviation, size=count)

    stated = accounting.epsilon(found.event, delta=1e-3)
    assert lower_bound(seen(list(range(10))), 1.0, 0.0, trials=200_000, delta=1e-3).refutes(stated)
    assert not lower_bound(seen([0, 5]), 1.0, 0.0, trials=200_000, delta=1e-3).refutes(stated)
