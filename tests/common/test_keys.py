"""The keystream and what is drawn from it: exact combinatorics, and statistics that a wrong scale fails."""

import collections
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from terrine.common.keys import Key, Purpose
from terrine.common.normal_values import BLOCK, box_muller
from terrine.common.random_words import AesCounter

KEY = Key.seeded(7)
ALARM = 1e-6  # false-alarm rate of every statistical test here; seeds are fixed, so each either passes or never does


def draw(step=0, purpose=Purpose.NOISE):
    return KEY.draw(purpose, step)


def fits_normal(values, deviation):
    """Whether Kolmogorov and Smirnov accept N(0, deviation^2)."""
    return stats.kstest(values, "norm", args=(0, deviation)).pvalue > ALARM


def test_noise_is_normal_with_the_asked_deviation():
    values = draw().normal(400_001, deviation=2.5).numpy()
    assert fits_normal(values, 2.5)


@pytest.mark.parametrize("wrong", [2.46, 2.54])
def test_a_wrong_scale_fails(wrong):
    assert not fits_normal(draw().normal(1_600_001, deviation=wrong).numpy(), 2.5)


def test_moments_and_tails_are_those_of_a_normal():
    values = np.concatenate([draw(step).normal(1_000_000).numpy() for step in range(4)]).astype(np.float64)
    assert abs(values.mean()) < 5 / math.sqrt(len(values))
    assert abs((values**2).mean() - 1) < 5 * math.sqrt(2 / len(values))
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / len(values))
    for edge in (3.0, 4.0):
        expected = 2 * stats.norm.sf(edge) * len(values)
        assert abs((np.abs(values) > edge).sum() - expected) < 5 * math.sqrt(expected)


def test_both_halves_of_a_pair_are_independent():
    values = draw().normal(65_536).numpy()
    first, second = values[:32_768], values[32_768:]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(32_768)
    assert abs(np.corrcoef(first**2, second**2)[0, 1]) < 5 / math.sqrt(32_768)


def test_pairs_are_those_of_box_and_muller():
    """Against float64 and the library's functions, with every edge of a word."""
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**62])
    radii = torch.cat([edges, draw().segment(0).words(100_000).view(torch.int64)])
    turns = draw().segment(1).words(len(radii))
    turns[:6] = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**30])
    found = box_muller(radii, turns).double()
    uniform = (radii.double().abs() / 2**63).clamp(min=2.0**-64)
    wanted = torch.polar((-2 * uniform.log()).sqrt(), turns.double() * math.pi / 2**31)
    assert found.isfinite().all()
    assert 9.4 < found.norm(dim=0).max() < 9.5  # a word of 0 is the far end of the tail
    error = (found - torch.stack([wanted.real, wanted.imag])).abs()
    assert (error < 2e-6 + 2.0**-24 / wanted.abs().clamp(min=2.0**-12)).all()  # where u is almost 1, float32 rounds it
    assert error.max() < 2.0**-12  # even there a quarter of the grid


def test_the_tail_is_not_cut_off_where_32_bits_end():
    """Radii beyond 6.66, of which 32 bits know none, follow their distribution: given u < 2^-32, u is uniform."""
    radii = draw().segment(0).words(20_000).view(torch.int64) >> 33 & (2**31 - 1)  # 63 bits of which 32 are 0
    radius = box_muller(radii, torch.zeros(len(radii), dtype=torch.int32))[0].double().numpy()
    assert radius.min() > math.sqrt(64 * math.log(2)) - 1e-5
    assert stats.kstest(np.exp(-(radius**2) / 2) * 2.0**32, "uniform").pvalue > ALARM


def test_an_address_always_gives_the_same_and_no_other_does():
    first = draw(3).normal(1000)
    assert torch.equal(first, draw(3).normal(1000))
    assert not torch.equal(first, draw(4).normal(1000))
    assert not torch.equal(first, draw(3, Purpose.QUANTILE).normal(1000))
    assert not torch.equal(first, Key.fresh().draw(Purpose.NOISE, 3).normal(1000))


def test_fresh_keys_differ_and_hide_their_secret():
    assert Key.fresh().secret != Key.fresh().secret
    assert KEY.secret.hex() not in repr(KEY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_lands_in_place_whatever_the_layout(dtype):
    target = torch.ones(6, 5, dtype=dtype).t()
    draw().add_normal(target, 1.0)
    assert target.unique().numel() > 10
    assert target.shape == (5, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_protected_sum_is_noisy_and_lies_on_the_grid(dtype):
    total = torch.full((100_001,), 0.3, dtype=dtype)
    draw().protect(total, 3.0)
    steps = total.double() / (2 * 2**-10)  # 2 is the power of two below 3
    assert torch.equal(steps, steps.round())
    assert fits_normal((total - 0.3).numpy(), 3.0)
    untouched = torch.full((5,), 0.3, dtype=dtype)
    draw().protect(untouched, 0.0)
    assert torch.equal(untouched, torch.full((5,), 0.3, dtype=dtype))


def test_noise_does_not_depend_on_threads():
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        totals = [torch.full((size,), 0.25) for size in (1, BLOCK - 1, 3, 12 * BLOCK + 7, 70)]
        draw().protect(totals, 3.0, over=8.0)
        found.append(totals)
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(torch.cat(found[0]).unique()) > 10_000


def test_a_protected_sum_is_divided_after_rounding():
    whole, part = torch.full((1001,), 0.25), torch.full((1001,), 0.25)
    draw().protect(whole, 3.0)
    draw().protect(part, 3.0, over=8.0)
    assert torch.equal(whole / 8, part)


def test_two_draws_of_one_address_do_not_share_values():
    one = draw()
    first, second = one.normal(1000), one.normal(1000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(1000)


def test_the_keystream_is_that_of_the_standard():
    """NIST SP 800-38A, F.5.5: AES-256 in counter mode."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    text = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    sealed = bytes.fromhex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5")
    made = AesCounter(key, counter).words(8).numpy().tobytes()
    assert bytes(a ^ b for a, b in zip(made, text, strict=True)) == sealed


@pytest.mark.parametrize("sizes", [[5, 3], [1 << 17, 1], [0, 7]])
def test_a_keystream_is_read_in_order(sizes):
    stream = draw().segment(3)
    assert torch.equal(torch.cat([stream.words(size) for size in sizes]), draw().segment(3).words(sum(sizes)))


def test_each_index_is_chosen_with_the_rate():
    counts = np.zeros(50)
    sizes = []
    for step in range(20_000):
        chosen = draw(step, Purpose.LOT).chosen(50, 0.1)
        counts[chosen] += 1
        sizes.append(len(chosen))
    assert stats.chisquare(counts, np.full(50, counts.sum() / 50)).pvalue > ALARM
    assert abs(counts.sum() - 100_000) < 5 * math.sqrt(1e6 * 0.1 * 0.9)
    assert abs(np.var(sizes) - 50 * 0.1 * 0.9) < 0.25  # a fixed size would have variance 0
    assert (
        stats.chisquare(
            np.bincount(sizes, minlength=12)[:12], stats.binom.pmf(range(12), 50, 0.1) * 20_000, sum_check=False
        ).pvalue
        > ALARM
    )


def test_two_indices_are_chosen_independently():
    both = sum({3, 4} <= set(draw(step, Purpose.LOT).chosen(10, 0.3).tolist()) for step in range(20_000))
    assert abs(both - 20_000 * 0.09) < 5 * math.sqrt(20_000 * 0.09 * 0.91)


def test_extreme_rates():
    assert len(draw().chosen(1000, 1.0)) == 1000
    assert len(draw().chosen(1000, 1e-300)) == 0


def test_every_subset_is_equally_likely():
    for size in (2, 3):
        seen = collections.Counter(tuple(draw(step).subset(5, size).tolist()) for step in range(10_000))
        expected = list(itertools.combinations(range(5), size))
        assert set(seen) == set(expected)
        assert stats.chisquare([seen[one] for one in expected]).pvalue > ALARM


def test_every_order_is_equally_likely():
    seen = collections.Counter(tuple(draw(step).permutation(4).tolist()) for step in range(24_000))
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > ALARM


def test_below_is_uniform():
    values = draw().below(7, 70_000)
    assert stats.chisquare(np.bincount(values, minlength=7)).pvalue > ALARM
    assert draw().below(1, 3).tolist() == [0, 0, 0]
