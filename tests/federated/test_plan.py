"""One plan makes sampling, noise and event."""

import contextlib
import math

import numpy as np
import pytest

from terrine import accounting, federated
from terrine.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent
from terrine.events import Budget, Gaussian, PoissonSampled, Repeated, Skellam, Unit, is_reproducible
from terrine.federated.drawing import draw
from terrine.rng import Seeded
from tests.federated.conftest import KINDS, small_plan

BUDGET = Budget(epsilon=4.0, delta=1e-5)
ASKED = {"clients": 1_000, "per_round": 50, "rounds": 200, "clip": 0.5, "budget": BUDGET}
SUMS = {
    "central": federated.Central(),
    "skellam": federated.Skellam(bits=20, survivors=40),
    "discrete gaussian": federated.DiscreteGaussian(bits=20, survivors=40),
}


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
def test_the_noise_spends_the_budget_and_no_more(sums):
    plan = federated.Plan(**ASKED, sums=sums)
    assert 3.99 < plan.epsilon <= 4.0
    assert plan.epsilon == accounting.epsilon(plan.event, delta=1e-5)
    assert plan.event.unit is Unit.CLIENT
    assert plan.event.event.rate == 0.05
    assert plan.insider_epsilon > plan.epsilon


def test_shares_cost_what_central_noise_costs():
    found = [federated.Plan(**ASKED, sums=sums).noise for sums in SUMS.values()]
    assert max(found) <= min(found) * (1 + 1e-6)


def test_the_event_is_that_of_the_rounded_vector():
    plan = small_plan()
    assert plan.event == Repeated(
        PoissonSampled(Skellam(noise=1.0, sensitivity=plan.reach, unit=Unit.CLIENT), rate=0.2), times=5
    )


def test_both_bounds_for_every_number_of_survivors():
    found = small_plan(survivors=5).dropouts()
    assert list(found) == [5, 6, 7, 8]
    assert all(one.lower <= one.upper for one in found.values())
    assert all(np.diff([one.upper for one in found.values()]) < 0)  # more survivors, more noise
    assert found[5].upper == pytest.approx(small_plan(survivors=5).epsilon)


def test_those_who_tell_their_noise_are_not_counted():
    """c of the survivors give their share away: each of the others adds more."""
    plain, colluding = small_plan(), small_plan(colluding=2)
    assert plain.epsilon == pytest.approx(colluding.epsilon, rel=1e-6)
    honest = [(plan.deviation / plan.reach) ** 2 / plan.sums.honest for plan in (plain, colluding)]
    assert honest[1] == pytest.approx(honest[0] * 6 / 4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"per_round": 50}, "per_round"),
        ({"survivors": 9}, "survivors"),
        ({"survivors": 1}, "survivors"),
        ({"colluding": 5}, "colluding"),
        ({"bits": 33}, "bits"),
        ({"bits": 6}, "bits"),
        ({"clip": -1.0}, "clip"),
        ({"noise": None}, "budget"),
        ({"sums": "skellam"}, "sums"),
        ({"sampling": federated.PoissonClients}, "sampling"),
        ({"clients": 0}, "clients"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_line(changes, why):
    with pytest.raises(InvalidArgument, match=why) as refusal:
        small_plan(**changes)
    assert "\n" not in str(refusal.value)


def test_too_little_noise_for_a_budget_is_refused():
    with pytest.raises(BudgetExceeded):
        federated.Plan(**ASKED, noise=0.3)


def test_adaptive_clipping_is_billed_in_one_release():
    plan = small_plan(clip=federated.AdaptiveClipping(initial=0.1, weight=0.2))
    assert plan.bound == pytest.approx(math.hypot(1, 0.1))
    assert plan.event == small_plan().event  # the same noise, relative to a longer vector


def test_a_seed_is_stamped():
    assert is_reproducible(small_plan(seed=1).event)
    assert not is_reproducible(small_plan().event)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_noise_givers_are_as_many_whoever_is_drawn(kind):
    """The number of shares must not tell how many clients were drawn."""
    plan, rng, sizes = small_plan(kind), Seeded(2), []
    for _ in range(300):
        drawn = draw(plan, rng)
        assert len(set(drawn.giving)) == len(drawn.giving) == 8
        if len(drawn.contributing) <= 8:
            assert set(drawn.contributing) <= set(drawn.giving)
        else:
            assert set(drawn.giving) <= set(drawn.contributing)
        sizes.append(len(drawn.contributing))
    assert 7 < np.mean(sizes) < 9
    assert np.var(sizes) > 4  # Poisson sampling, not samples of one size


def test_the_plan_is_for_gaussian_noise_where_the_server_is_trusted():
    plan = federated.Plan(**ASKED)
    assert isinstance(plan.event.event.event, Gaussian)
    assert plan.dropouts().keys() == {0}


@pytest.mark.parametrize("bits", [9, 10, 12, 16, 32])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("epsilon", [0.5, 8.0, 15.0])
def test_few_bits_are_calibrated_or_refused_in_words(bits, kind, epsilon):
    """Few grid steps cost a little more noise; too few are refused, and nothing is found by luck."""
    asked = {"clients": 60, "per_round": 12, "rounds": 20, "clip": 1.0, "budget": Budget(epsilon, 1e-3)}
    sums = kind(bits=bits, survivors=10)
    if bits >= 12:
        assert 0.9 * epsilon < federated.Plan(**asked, sums=sums).epsilon <= epsilon
        return
    with contextlib.suppress(InvalidArgument, UnsupportedEvent):
        assert federated.Plan(**asked, sums=sums).epsilon <= epsilon
