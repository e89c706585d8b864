"""Private whitening: what it releases is within one example's reach, billed, and noisy by the stated deviation."""

import math
from dataclasses import replace

import pytest
import torch

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.events import Budget, Composed, Gaussian, Neighbours, Reproducible
from terrine.features import whitening
from terrine.features.whitening import private_whitening


def maps(count=4000, seed=0):
    """Six channels, one of them large, on 3 x 3 places, far from zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, 3, 3, generator=generator) * torch.tensor([5.0, 1, 1, 1, 0.5, 0.1]).view(6, 1, 1) + 4
    return torch.nn.functional.normalize(x.flatten(1), dim=1).view(x.shape)


def test_without_noise_to_speak_of_it_is_the_plain_formula():
    x = maps()
    found = private_whitening(x, mean_noise=1e-4, noise=1e-4, power=1.0, keep=4, seed=0)
    mean = x.mean(0)
    assert torch.allclose(found.mean, mean, atol=1e-5)
    centred = torch.stack([one / one.norm() for one in x - mean])
    moments = sum(one.flatten(1) @ one.flatten(1).T for one in centred).double()
    values, vectors = torch.linalg.eigh(moments / moments.trace())
    expected = []
    for one in x[:5] - mean:
        rows = torch.stack([(values[k] + 1e-3) ** -0.5 * vectors[:, k].float() @ one.flatten(1) for k in (5, 4, 3, 2)])
        expected.append(rows.flatten() / rows.norm())
    aligned = (found(x[:5]).view(5, 4, 9) * torch.stack(expected).view(5, 4, 9)).sum(2)  # eigenvectors have no sign
    size = torch.stack(expected).view(5, 4, 9).square().sum(2)
    assert torch.allclose(aligned.abs(), size, atol=1e-4)


def test_both_releases_are_billed_and_a_seed_is_stamped():
    x = maps(50)
    both = Composed([Gaussian(noise=one, neighbours=Neighbours.ADD_REMOVE) for one in (40.0, 20.0)])
    assert private_whitening(x).event == both
    assert private_whitening(x, seed=1).event == Reproducible(both)
    assert private_whitening(x, power=0.0).event == both.parts[0]
    plan = sgd.Plan(
        examples=50, lot=5, steps=3, clip=1.0, budget=Budget(1.0, 1e-5), preparation=(private_whitening(x).event,)
    )
    assert plan.epsilon <= 1.0
    with pytest.raises(InvalidArgument, match="neighbours"):  # replacing an example moves the mean's sum by 2
        replace(plan, sampling=sgd.FixedSize(), noise=4.0)


def test_one_example_moves_each_release_by_at_most_one(monkeypatch):
    """Without noise, leaving out any one example, however wild, changes the sums by at most 1 in Frobenius norm."""
    monkeypatch.setattr(whitening.Key, "draw", lambda self, purpose, step: _Silent())
    x = torch.cat([maps(20), 1e6 * torch.ones(1, 6, 3, 3), torch.full((1, 6, 3, 3), math.nan)])
    key, mean = whitening.Key.seeded(0), torch.rand(6, 3, 3) / 10
    for place in range(len(x)):
        less = torch.cat([x[:place], x[place + 1 :]])
        sums = [whitening._mean(one, torch.ones(len(one)), key, 1.0) for one in (x, less)]
        assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-4
        moments = [whitening._moments(one, torch.ones(len(one)), mean, key, 1.0) for one in (x, less)]
        assert float((moments[0] - moments[1]).norm()) <= 1 + 1e-4


def test_an_example_that_is_left_out_adds_nothing_but_is_still_counted(monkeypatch):
    monkeypatch.setattr(whitening.Key, "draw", lambda self, purpose, step: _Silent())
    x, key, out = maps(30), whitening.Key.seeded(0), torch.tensor([3, 17])
    there = torch.tensor([place for place in range(30) if place not in (3, 17)])
    every, shares = torch.ones(30), torch.ones(30)
    shares[out] = 0.0
    total = whitening._mean(x, shares, key, 1.0)
    assert torch.allclose(total, whitening._mean(x[there], every[there], key, 1.0), atol=1e-5)
    mean = total / 30
    left = whitening._moments(x, shares, mean, key, 1.0)
    assert torch.allclose(left, whitening._moments(x[there], every[there], mean, key, 1.0))
    assert not torch.allclose(left, whitening._moments(x, every, mean, key, 1.0))
    other = x.clone()
    other[out] = -1.0
    assert torch.equal(whitening._mean(other, shares, key, 1.0), total)
    both = [whitening.private_whitening(one, without=out, seed=1).mean for one in (x, other)]
    assert torch.equal(*both)


class _Silent:
    def protect(self, total, deviation):
        pass

    def normal(self, *shape, deviation):
        return torch.zeros(shape)


def test_the_noise_has_its_deviation():
    """Five deviations of the sample deviation: a false alarm below 1e-6; twice or half the scale is far outside."""
    key = whitening.Key.seeded(3)
    mean = whitening._mean(torch.zeros(1, 40, 10, 10), torch.ones(1), key, 7.0).flatten()
    assert abs(float(mean.std()) / 7 - 1) < 5 / math.sqrt(2 * mean.numel())
    moments = whitening._moments(torch.zeros(1, 150, 1, 1), torch.ones(1), torch.zeros(150, 1, 1), key, 2.0)
    above = moments[torch.triu(torch.ones_like(moments), 1).bool()]
    assert torch.equal(moments, moments.T)
    assert abs(float(above.std()) / math.sqrt(2) - 1) < 5 / math.sqrt(2 * len(above))
    assert abs(float(moments.diagonal().std()) / 2 - 1) < 5 / math.sqrt(2 * 150)


def test_examples_come_out_of_length_one_each_on_its_own():
    x = maps(30)
    found = private_whitening(x, keep=3, blur=0.2, seed=0)
    assert found(x).shape == (30, 27)
    assert torch.allclose(found(x).norm(dim=1), torch.ones(30), atol=1e-5)
    assert torch.allclose(found(x)[:1], found(x[:1]), atol=1e-6)


def test_more_channels_than_there_are_are_refused():
    with pytest.raises(InvalidArgument, match="at most the 6 channels"):
        private_whitening(maps(5), keep=7)
