"""The nodes of a sampled Gaussian against 40-digit arithmetic, and the bounds that make them a proof."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from terrine.accounting import certified
from terrine.accounting.quadrature import GOAL, Crowded, Line, Nodes, QuadratureGrid
from terrine.events import Gaussian, PoissonSampled, Repeated

LAWS = [
    (0.25, 0.01, 16.0, 300.0),
    (1 / 1.1, 256 / 60_000, 7.0, 18.0),
    (0.1, 0.001, 900.0, 9_000.0),
    (1.7, 0.05, 2.0, 4.0),
]
"""mu, rate, and a tilt and frequency at which an accountant needs its moments."""
LEFT = [(0.05, 0.3, 500.0, 300.0), (0.1, 0.01, 8_000.0, 3_000.0), (0.02, 0.01, 20_000.0, 3_000.0)]
"""The same where, backward, the tilt takes the mass far to the left."""
DIRECTED = [(law, forward) for law in LAWS for forward in (True, False)] + [(law, False) for law in LEFT]


def served(mu, rate, tilt, frequency, *, forward):
    """Nodes made for a tilt and a frequency, and log of the moment at the tilt."""
    first = Nodes.of(Line(mu, rate), forward=forward)
    moment = math.log(float(first.mass @ np.exp(tilt * first.loss)))
    nodes = first.refined(tilt, frequency, moment, highest=tilt)
    return nodes, math.log(float(nodes.mass @ np.exp(tilt * nodes.loss)))


def exact_integrand(nodes, order):
    """phi u^(1+z), or phi u^(-z) backward, in mpmath."""
    mu, rate = mp.mpf(nodes.grid.line.mu), mp.mpf(nodes.grid.line.rate)
    power = 1 + order if nodes.forward else -order

    def integrand(x):
        return mp.npdf(x) * (1 + rate * mp.expm1(mu * x - mu * mu / 2)) ** power

    return integrand


def exact_gap(nodes, order):
    """|sum over the nodes - integral|, the integral taken as the same sum sixteen times as fine."""
    integrand = exact_integrand(nodes, order)
    grid = nodes.grid
    step, first, last = mp.mpf(grid.step), round(grid.first / grid.step), round(grid.last / grid.step)
    coarse = step * mp.fsum(integrand(k * step) for k in range(first, last + 1))
    fine = step / 16
    return abs(coarse - fine * mp.fsum(integrand(k * fine) for k in range(16 * first - 200, 16 * last + 201)))


@pytest.mark.parametrize(("law", "forward"), DIRECTED)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_moments_on_nodes_are_as_exact_as_promised(law, forward, share):
    mu, rate, tilt, frequency = law
    nodes, log_moment = served(mu, rate, tilt, frequency, forward=forward)
    with mp.workdps(45):
        gap = exact_gap(nodes, mp.mpc(tilt, share * frequency))
    assert gap <= GOAL * math.exp(log_moment)


@pytest.mark.parametrize("law", LAWS[:2])
def test_nodes_thrice_as_far_apart_break_the_promise(law):
    """The bound is no bound on everything: it is what chooses the spacing."""
    mu, rate, tilt, frequency = law
    nodes, log_moment = served(mu, rate, tilt, frequency, forward=True)
    grid = nodes.grid
    sparse = replace(nodes, grid=QuadratureGrid(grid.line, 3 * grid.step, grid.low, grid.high))
    with mp.workdps(45):
        gap = exact_gap(sparse, mp.mpc(tilt, frequency))
    assert gap > GOAL * math.exp(log_moment)


@pytest.mark.parametrize("law", LAWS)
def test_what_is_known_of_the_opposite_direction_is_no_less_than_what_is_found(law):
    mu, rate, tilt, frequency = law
    turned = served(mu, rate, tilt, frequency, forward=True)[0].opposite()
    cells, strip = turned._cells(tilt, frequency), np.array([turned.strip])
    angles = frequency * cells.angles[[turned.which]]
    assert turned.bound.log_size >= cells.log_size(strip, turned.power(tilt), angles)[0]


@pytest.mark.parametrize(("law", "forward"), DIRECTED)
@pytest.mark.parametrize("order", [0.0, 1.0, 3.0, 10.0])
def test_the_error_at_any_order_is_bounded(law, forward, order):
    mu, rate, tilt, frequency = law
    nodes, _ = served(mu, rate, tilt, frequency, forward=forward)
    with mp.workdps(45):
        gap = exact_gap(nodes, mp.mpf(order))
    assert gap <= mp.exp(nodes.log_error(order))


@pytest.mark.parametrize(("law", "forward"), DIRECTED)
def test_masses_add_up_to_one_within_their_bound(law, forward):
    mu, rate, tilt, frequency = law
    nodes, _ = served(mu, rate, tilt, frequency, forward=forward)
    assert abs(float(nodes.mass.sum()) - 1) <= nodes.mass_error + 1e-14


@given(
    mu=st.floats(0.02, 3.0),
    rate=st.floats(1e-5, 0.9),
    tilt=st.floats(0.1, 30.0),
    forward=st.booleans(),
    share=st.floats(0.01, 5.0),
)
def test_a_transform_is_never_larger_than_its_bound(mu, rate, tilt, forward, share):
    """|E e^(itL)| at three points of an octave, against the bound from pairs of cells and from the total variation."""
    nodes = Nodes.of(Line(mu, rate), forward=forward)
    weight = nodes.mass * np.exp(tilt * (nodes.loss - nodes.loss.max()))
    weight /= weight.sum()
    spread = math.sqrt(float(weight @ (nodes.loss - weight @ nodes.loss) ** 2))
    low = share / max(spread, 1e-12)
    log_moment = float(logsumexp(tilt * nodes.loss, b=nodes.mass))
    try:
        nodes = nodes.refined(tilt, 2 * low, log_moment, highest=tilt)
    except Crowded:
        return
    log_moment = float(logsumexp(tilt * nodes.loss, b=nodes.mass))
    weight = nodes.mass * np.exp(tilt * nodes.loss - log_moment)
    bound = nodes.tilted(tilt, log_moment).log_decay(low, 2 * low)
    for t in (low, 1.5 * low, 2 * low):
        assert abs(weight @ np.exp(1j * t * nodes.loss)) <= math.exp(bound) + 1e-12


def test_the_bound_on_a_transform_is_worth_having():
    nodes, log_moment = served(0.25, 0.01, 16.0, 300.0, forward=True)
    spread = 0.25 * 0.01
    density = nodes.tilted(16.0, log_moment)
    assert density.log_decay(0.5 / spread, 1 / spread) < -0.01
    assert density.log_decay(3 / spread, 6 / spread) < -0.8


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        (4.0, 0.01, 10_000, 1e-5),
        (1.1, 256 / 60_000, 14_062, 1e-5),
        (10.0, 0.001, 1_000, 1e-5),
        (0.8, 1e-4, 10**7, 1e-8),
    ],
)
def test_nodes_and_cells_agree(noise, rate, steps, delta, monkeypatch):
    event = Repeated(PoissonSampled(Gaussian(noise=noise), rate=rate), times=steps)
    nodes = certified.bounds(event, delta=delta)
    monkeypatch.setattr(certified, "_LEAST_NOISE", math.inf)
    cells = certified.bounds(event, delta=delta)
    assert cells.lower <= nodes.upper
    assert nodes.lower <= cells.upper
    assert nodes.upper - nodes.lower < cells.upper - cells.lower
