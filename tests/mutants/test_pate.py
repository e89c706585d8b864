"""Historical PATE bugs, built on purpose: each must be caught by something the library does or tests."""

import io
import math

import numpy as np
import pytest

from terrine import accounting, events, pate
from terrine.accounting import pate as costs
from terrine.audit.tester import lower_bound
from terrine.errors import InvalidArgument
from terrine.pate.partitions import Partition
from terrine.rng import Seeded


def test_overlapping_teachers_are_caught_at_the_deal_and_at_the_bill():
    with pytest.raises(InvalidArgument, match="disjoint"):
        Partition.of_parts([[0, 1, 2], [2, 3, 4]])
    forged = {"kind": "disjoint", "teachers": 2, "unit": "example", "most_parts": 2, "digest": ""}
    votes, rule = pate.Votes(np.array([[2, 0]]), forged), pate.GaussianMax(1.0)
    with pytest.raises(InvalidArgument, match="not disjoint"):
        rule.answer(votes, rng=Seeded(0))


def test_laplace_of_one_over_gamma_billed_as_gamma_is_caught():
    """The counts of both classes move: whoever sees them learns 2 gamma, and our bill says so."""
    gamma = 1.0
    honest = accounting.epsilon(pate.LaplaceMax(1 / gamma).event(1), delta=1e-12)
    assert honest == pytest.approx(2 * gamma, rel=1e-6)

    def counts(row, number):
        noise = np.random.default_rng(1).laplace(scale=1 / gamma, size=(number, 2))
        return (1 * (noise[:, 0] + row[0] > 20.5) + 2 * (noise[:, 1] + row[1] > 19.5)).tolist()

    found = lower_bound(counts, [21, 19], [20, 20], trials=300_000, confidence=0.999)
    assert found.refutes(gamma)
    assert not found.refutes(honest)


def test_an_unsorted_sensitivity_is_caught():
    def unsorted(row, gamma, order):
        return 0.0 if row[0] < row[1] else math.inf

    leader_last = np.array([[5, 60, 10]])
    assert unsorted(leader_last[0], 0.1, 2.0) == 0.0
    assert costs.laplace_max_sensitivity(leader_last, noise=10.0, order=2.0).max() > 0


def test_a_sensitivity_of_zero_for_a_large_order_is_caught():
    """'l too large to compute sensitivity: return 0'."""
    row = [[60, 10, 5]]
    for order in (50.0, 500.0):
        assert costs.laplace_max_sensitivity(row, noise=2.0, order=order).max() > 0
        assert costs.gaussian_max_local_sensitivity(row, noise=20.0, order=order).max() > 0


def test_a_threshold_without_noise_is_caught():
    rule = pate.ConfidentGaussianMax(threshold=21, test_noise=1e-3, noise=5.0)
    assert accounting.epsilon(rule.event(1, 1), delta=1e-5) > 1e5
    with pytest.raises(InvalidArgument):
        pate.ConfidentGaussianMax(threshold=21, test_noise=0.0, noise=5.0)


def test_the_condition_q_below_one_half_is_caught():
    """At 2 gamma = 2 and q = 0.3 the lecture's branch gives a number below the truth (here: not even a number)."""
    q, pure, moment = 0.3, 2.0, 4
    inside = (1 - q) * ((1 - q) / (1 - math.exp(pure) * q)) ** moment + q * math.exp(pure * moment)
    lecture = min(0.5 * pure**2 * moment * (moment + 1), math.log(inside), pure * moment) / moment
    row = [[11, 10]]
    assert costs.laplace_max_rdp(row, noise=1.0, orders=moment + 1.0)[0, 0] >= min(pure, pure**2 * 2.5) - 1e-12
    assert lecture < pure


def test_a_raw_bill_that_is_printed_is_caught(capsys):
    votes = pate.Votes(np.tile([390, 5, 5], (40, 1)), pate.split(4000, 400, seed=0).record())
    rule = pate.GaussianMax(25.0)
    answers = rule.answer(votes, rng=Seeded(0))
    priced = pate.bill(votes, answers, rule, delta=1e-5, rng=Seeded(0))
    secret = f"{priced.sealed.unsafe_open():.6f}"
    stream = io.StringIO()
    print(priced, repr(priced), priced.as_json(), priced.sealed, file=stream)
    assert secret[:6] not in stream.getvalue()
    assert f"{float(secret):.6f}" == secret


def test_a_bill_that_forgets_abstentions_is_caught():
    """Every test costs, whether or not an answer follows."""
    rule = pate.ConfidentGaussianMax(threshold=300, test_noise=40.0, noise=20.0)
    votes = pate.Votes(np.tile([14, 13, 13], (30, 1)), pate.split(80, 40, seed=0).record())
    answers = rule.answer(votes, most=1, rng=Seeded(0))
    assert not len(answers.answered)
    assert accounting.epsilon(answers.event, delta=1e-5) >= accounting.epsilon(
        events.Repeated(events.Gaussian(noise=40.0, neighbours=events.Neighbours.REPLACE_ONE), times=30), delta=1e-5
    )
