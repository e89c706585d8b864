"""Large losses taken out: against all outcomes of a small composition, and where it makes the bounds tight."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrine import accounting
from terrine.accounting import certified
from terrine.accounting.independent import Composition, Part
from terrine.accounting.loss_distribution import Losses
from terrine.accounting.rare import apart
from terrine.events import Gaussian, PoissonSampled, Repeated

TINY = st.lists(st.floats(-0.01, 0.02), min_size=2, max_size=4)
LARGE = st.lists(st.floats(0.5, 4.0), min_size=1, max_size=2)


def outcomes(composition):
    """Every sum of losses with its chance."""
    steps = [part.losses for part in composition.parts for _ in range(int(part.times))]
    for atoms in itertools.product(*(zip(one.loss, one.mass, strict=True) for one in steps)):
        yield sum(loss for loss, _ in atoms), math.prod(mass for _, mass in atoms)


def delta(composition, epsilon):
    """By its definition."""
    found = sum(mass * max(0.0, -math.expm1(epsilon - loss)) for loss, mass in outcomes(composition))
    return found + composition.escaped


@given(tiny=TINY, large=LARGE, times=st.integers(1, 3), share=st.floats(1e-6, 0.3), at=st.floats(0.0, 1.0))
def test_nothing_is_lost_by_taking_large_losses_out(tiny, large, times, share, at):
    loss = np.array(tiny + large)
    mass = np.array([1.0] * len(tiny) + [share] * len(large))
    composition = Composition((Part(Losses(loss, mass / mass.sum(), 0.0), times),))
    beyond = 0.05
    split = apart(composition, beyond)
    epsilon = at * beyond
    exact, rest = delta(composition, epsilon), delta(split.rest, epsilon)
    below = rest - 1e-9 * split.rest.escaped  # what escapes is rounded up, which a lower bound takes back
    assert below - math.exp(epsilon) * split.most <= exact + 1e-14
    assert rest - math.exp(epsilon) * split.least >= exact - 1e-14
    assert rest - math.exp(epsilon) * split.least == pytest.approx(exact, rel=1e-6, abs=1e-13)


def test_where_other_steps_could_make_up_for_a_large_loss_nothing_is_cut_there():
    """At a cut of 0.3 the sum of a large loss and two low ones would be below epsilon, and the identity would fail."""
    losses = Losses(np.array([-0.2, 0.0, 0.35]), np.array([0.3, 0.4, 0.3]), 0.0)
    composition = Composition((Part(losses, 3),))
    assert apart(composition, 0.1) is None
    cut = Composition((Part(Losses(losses.loss[:2], losses.mass[:2], 0.3), 3),))
    chance = 1 - (1 - 0.3 * math.exp(-0.35)) ** 3
    assert delta(cut, 0.1) - math.exp(0.1) * chance < delta(composition, 0.1) - 1e-3


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta", "peer"),
    [(1.0701109465963695e-05, 0.30480584744293704, 10, 5.7650037161158575e-05, 5.651805e-4),
     (4.960510305156664e-06, 0.42669741277239537, 11, 7.565958447430365e-06, 4.3253586e-4)],
)  # fmt: skip
def test_losses_of_two_scales_are_bounded_as_tightly_as_by_a_fine_grid(rate, noise, steps, delta, peer):
    """Peer: dp-accounting's pessimistic estimate with intervals of 5e-6 and 2e-6."""
    event = Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate), times=steps)
    found = accounting.bounds(event, delta=delta)
    assert found.upper * 0.9998 <= found.lower <= peer
    assert found.upper <= peer * 1.0001
    back = certified.delta_bounds(event, epsilon=found.upper)
    assert back.lower <= delta <= back.upper * (1 + 1e-4)
    assert back.upper <= back.lower * 1.001
