"""The keystream and what is drawn from it: exact combinatorics, and statistics that a wrong scale fails."""

import collections
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from terrine.sgd.kernels import SPARE, aes
from terrine.sgd.kernels.image import Table
from terrine.sgd.kernels.normals import add_normals, refine
from terrine.sgd.kernels.vectors import features
from terrine.sgd.noise import Key, Purpose
from terrine.sgd.normal import BLOCK, RUN, _processor_agrees

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


def test_the_tail_is_refined_far_beyond_32_bits():
    words = np.array([0, 1, 1_000_000], dtype=np.uint32)
    uniform = words.astype(np.float32)
    refine(uniform, words, draw().words(SPARE))
    assert 0 < uniform[0] < 1 < uniform[1] < 2
    assert uniform[2] == 1e6


def test_refined_values_are_uniform_between_whole_ones():
    words = np.full(SPARE // 2, 3, dtype=np.uint32)
    refined = np.concatenate([_refined(words, step) for step in range(2_000)])
    assert stats.kstest(refined, "uniform", args=(3, 1)).pvalue > ALARM


def _refined(words, step):
    uniform = words.astype(np.float32)
    refine(uniform, words, draw(step).words(SPARE))
    return uniform


def test_pairs_are_those_of_box_and_muller():
    """Against float64 and the library's functions; a turn is a quarter, and an angle within it."""
    half = 50_001
    words = draw().words(2 * half + SPARE)
    words[:3], words[-SPARE : 2 - SPARE] = (0, 1, 2**32 - 1), 0
    sums, uniform = np.zeros(2 * half, np.float32), np.empty(half, np.float32)
    add_normals(sums, words, uniform, np.float32(1), np.float32(0), np.float32(1))
    radius = np.sqrt(-2 * np.log(np.float64(uniform) / 2**32))
    turn = words[half : 2 * half].astype(np.int64)
    within = (turn + 2**29) % 2**30 - 2**29
    quarter, angle = (turn - within) // 2**30 % 4, within * math.pi / 2**31
    pair = np.stack([np.cos(angle), np.sin(angle)]) * np.where(quarter & 2, -radius, radius)
    pair[:, quarter & 1 == 1] = pair[::-1, quarter & 1 == 1]
    assert radius.max() > 9.5  # a word of 0 is no end of the tail
    assert np.abs(sums.reshape(2, half) - pair).max() < 2e-6
    assert stats.kstest(np.arctan2(*pair), "uniform", args=(-math.pi, 2 * math.pi)).pvalue > ALARM


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


@pytest.mark.parametrize("threads", [1, 3])
def test_many_sums_are_protected_as_one_whatever_the_threads(threads):
    sizes = [1, BLOCK - 1, 3, 12 * RUN * BLOCK + 7, 70]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    totals = [torch.full((size,), 0.25) for size in sizes]
    draw().protect(totals, 3.0, over=8.0)
    torch.set_num_threads(before)
    alone = torch.full((sum(sizes),), 0.25)
    draw().protect(alone, 3.0)
    assert torch.equal(torch.cat(totals), alone / 8)


def test_two_draws_of_one_address_do_not_share_values():
    one = draw()
    first, second = one.normal(1000), one.normal(1000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(1000)


def test_round_keys_are_those_of_the_standard():
    """FIPS 197, appendix C.3."""
    keys = aes.schedule(bytes(range(32))).numbers.tobytes()
    assert len(keys) == 15 * 16
    assert keys[:32] == bytes(range(32))
    assert keys[-16:].hex() == "24fc79ccbf0979e9371ac23c6d68de36"


@pytest.mark.skipif(not aes.available(), reason="this processor has no instructions for AES")
@pytest.mark.parametrize("step", [0, 200, 2**40 + 129])
def test_the_processor_and_the_library_make_the_same_noise(step, monkeypatch):
    sizes = [5, 3 * BLOCK + 1, 2, RUN * BLOCK + 3]
    here = [torch.full((size,), 0.5) for size in sizes]
    draw(step).protect(here, 3.0, over=8.0)
    monkeypatch.setattr("terrine.sgd.normal._processor_agrees", lambda: False)
    there = [torch.full((size,), 0.5) for size in sizes]
    draw(step).protect(there, 3.0, over=8.0)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


@pytest.mark.skipif(not aes.available(), reason="this processor has no instructions for AES")
def test_a_processor_that_is_wrong_is_not_asked(monkeypatch, caplog):
    """One bit of one round key: all noise comes from the library then, and the log says so."""
    right = draw().normal(1_000)
    assert _processor_agrees()
    wrong = aes.schedule(KEY.secret).numbers.copy()
    wrong[12] ^= 1
    monkeypatch.setattr(aes, "schedule", lambda _: Table(wrong, wrong.ctypes.data))
    _processor_agrees.cache_clear()
    assert torch.equal(draw().normal(1_000), right)
    assert "AES" in caplog.text
    _processor_agrees.cache_clear()


WITHOUT = {
    "another processor": {"NUMBA_CPU_NAME": "generic"},
    "no AES": {"NUMBA_CPU_FEATURES": ",".join(f"+{one}" for one in sorted(features()) if "aes" not in one)},
}


@pytest.mark.parametrize("setting", WITHOUT.values(), ids=WITHOUT)
def test_a_processor_without_aes_makes_the_same_noise_by_the_library(tmp_path, setting):
    """All kernels load there too, and none of them ends the process."""
    code = (
        "import numpy, sys; from terrine.sgd import kernels; from terrine.sgd.kernels import aes; kernels.load()\n"
        "from terrine.sgd.noise import Key, Purpose; assert not aes.available()\n"
        "numpy.save(sys.argv[1], Key.seeded(7).draw(Purpose.NOISE, 0).normal(1_000).numpy())"
    )
    found = tmp_path / "noise.npy"
    done = subprocess.run(
        [sys.executable, "-c", code, str(found)], env={**os.environ, **setting}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(found), draw().normal(1_000).numpy(), rtol=1e-5, atol=1e-6)


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
