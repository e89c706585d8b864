"""Private principal components: billed, bounded, and noisy by the stated deviation."""

import math

import pytest
import torch

from terrine import accounting, sgd
from terrine.errors import InvalidArgument
from terrine.events import Gaussian, Neighbours, Reproducible
from terrine.features import projection


def test_a_projection_finds_the_directions_and_is_billed():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, generator=generator) @ torch.randn(3, 40, generator=generator)
    found = projection.private_projection(x, components=3, noise=4.0, seed=0)
    event = Gaussian(noise=4.0, neighbours=Neighbours.ADD_REMOVE)
    assert found.event == Reproducible(event)
    assert projection.private_projection(x, components=3, noise=4.0).event == event
    flat = x / x.norm(dim=1, keepdim=True)
    assert float((flat @ found.components).norm() / flat.norm()) > 0.99
    assert found(x).shape == (20_000, 3)


def test_one_example_moves_the_second_moments_by_at_most_one():
    """Frobenius norm of x x^T for |x| <= 1; the noise is isotropic in that norm."""
    row = projection._bounded(torch.full((1, 5), 100.0))
    assert float(torch.linalg.matrix_norm(row.T @ row)) <= 1 + 1e-6
    assert float(projection._bounded(torch.tensor([[math.nan, 1.0], [math.inf, 1.0]])).abs().sum()) == 0


def test_rows_of_sixteen_bits_are_bounded_as_well(monkeypatch):
    """Scaled in bfloat16, some of these would have norm 1.005: their moments a length above 1."""
    seen = []
    monkeypatch.setattr(projection, "protected_moments", lambda moments, *_: seen.append(moments) or moments)
    for row in 10 * torch.randn(50, 1, 100, generator=torch.Generator().manual_seed(0)):
        projection.private_projection(row.bfloat16(), components=2, seed=0)
    assert max(float(torch.linalg.matrix_norm(one)) for one in seen) <= 1 + 1e-12


def test_a_projection_is_refused_where_examples_are_replaced():
    """Two rows at right angles: replacing one by the other moves the moments by sqrt 2, not 1."""
    event = projection.private_projection(torch.eye(4), components=2, noise=4.0).event
    shared = {"examples": 100, "lot": 10, "steps": 5, "clip": 1.0, "noise": 1.0, "delta": 1e-5}
    assert sgd.Plan(**shared, preparation=(event,)).epsilon > 0
    with pytest.raises(InvalidArgument, match="neighbours"):
        _ = sgd.Plan(**shared, sampling=sgd.FixedSize(), preparation=(event,)).event


def test_the_noise_of_a_projection_has_its_deviation_in_every_direction(monkeypatch):
    seen = []
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: seen.append(matrix) or real(matrix))
    projection.private_projection(torch.zeros(3, 150), components=2, noise=2.0, seed=1)
    noise = seen[0]
    above = noise[torch.triu(torch.ones_like(noise), 1).bool()]
    assert torch.equal(noise, noise.T)
    assert abs(float(above.std()) / (2 / 2**0.5) - 1) < 5 / math.sqrt(2 * len(above))
    assert abs(float(noise.diagonal().std()) / 2 - 1) < 5 / math.sqrt(2 * 150)


def test_a_plan_that_was_prepared_costs_more():
    shared = {"examples": 1000, "lot": 50, "steps": 20, "clip": 1.0, "noise": 1.0, "delta": 1e-5}
    prepared = sgd.Plan(**shared, preparation=(Gaussian(noise=8.0),))
    assert prepared.epsilon > sgd.Plan(**shared).epsilon
    assert prepared.epsilon == accounting.epsilon(prepared.event, delta=1e-5)


def test_too_many_components_are_refused():
    with pytest.raises(InvalidArgument, match="at most the 4 features"):
        projection.private_projection(torch.rand(10, 4), components=5)
