"""Known bugs of federated learning, each built on purpose: each is caught, or VIOLATED by the black-box tester.

The bounds of the tester hold with probability 1 - 1e-6 each (seeds are fixed). Beside each mutant stands the right way
on the same two inputs, which must pass.
"""

import math

import numpy as np
import pytest
import torch

from terrine import accounting, federated
from terrine.audit import lower_bound
from terrine.errors import InvalidArgument
from terrine.events import Gaussian, Unit
from terrine.federated import drawing, secure
from terrine.federated.learning import Federation
from terrine.federated.quantise import Quantiser
from terrine.federated.secure import keys
from terrine.mechanisms.poisson_noise import skellam
from terrine.rng import SYSTEM, Seeded

DELTA, TRIALS = 1e-3, 400_000
SURVIVORS, GIVERS = 4, 8


def plan(noise=1.0, **changes):
    sums = federated.Skellam(survivors=SURVIVORS, colluding=changes.pop("colluding", 0))
    asked = {"clients": 8, "per_round": GIVERS, "rounds": 1, "clip": 1.0, "noise": noise, "delta": DELTA}
    return federated.Plan(**asked | {"sums": sums} | changes)


def claim(whole):
    """What one round costs a client that takes part."""
    return accounting.epsilon(whole.sums.event(whole.noise, whole.per_round, whole.dimension), delta=DELTA)


def refuted(mechanism, stated):
    """One client contributes its bound in one entry, or nothing."""
    return lower_bound(mechanism, 1.0, 0.0, trials=TRIALS, delta=DELTA, confidence=1 - 1e-6).refutes(stated)


def noisy(whole, survivors, *, divided_by=None, silent=0, rng=None):
    """The opened sum with the noise of so many survivors, as the engine draws it; the client's entry only."""
    rng = rng or Seeded(7)
    one = Quantiser(1, whole.bound, whole.reach, signs_seed=0)

    def runs(value, count):
        share = whole.deviation**2 / (divided_by or whole.sums.honest)
        added = skellam(count, share * (survivors - silent), rng)
        return one.scale * value + added  # the rotation of one number is its sign, which is public

    return runs


def test_the_right_shares_pass():
    assert not refuted(noisy(plan(), SURVIVORS), claim(plan()))


def test_shares_sized_for_all_instead_of_the_survivors():
    """Each of 8 adds an eighth of the noise; 4 drop out, and the sum is opened with half of it."""
    assert refuted(noisy(plan(), SURVIVORS, divided_by=GIVERS), claim(plan()))


def test_clients_that_add_no_noise_are_a_parameter_of_the_bill():
    """Two of the four survivors add nothing: refuted as billed, and covered by colluding=2."""
    assert refuted(noisy(plan(), SURVIVORS, silent=2), claim(plan()))
    careful = plan(colluding=2)
    assert not refuted(noisy(careful, SURVIVORS, silent=2), claim(careful))


def weighted_average(examples, count, rng):
    """One client's weight is its share of the examples: the sensitivity is not 1/n of the bound but up to all of it."""
    others = 10 * 9
    return 1.0 * examples / (others + examples) + rng.normal(scale=0.1, size=count)


def test_a_weighted_average_with_the_noise_of_an_unweighted_one():
    """Ten clients of clip 1, noise 1 x clip / 10, as if each weighed a tenth; one of them has 200 examples."""
    rng = np.random.default_rng(3)
    stated = accounting.epsilon(Gaussian(noise=1.0, unit=Unit.CLIENT), delta=DELTA)
    found = lower_bound(
        lambda examples, count: weighted_average(examples, count, rng), 200, 0, trials=TRIALS, delta=DELTA
    )
    assert found.refutes(stated)
    fair = lower_bound(lambda examples, count: weighted_average(examples, count, rng), 9, 0, trials=TRIALS, delta=DELTA)
    assert not fair.refutes(stated)


def test_there_is_no_way_to_weigh_clients_here():
    """Contributions are clipped one by one: a client that multiplies its vector by its examples gains nothing."""
    small = plan(noise=0.05)
    found = secure.sum(np.eye(8) * np.array([[1e6], *[[1.0]] * 7]), small)
    assert np.abs(found - 1).max() < 1.0


def masks_of_32_bits(value, rng):
    """flower 7522: a mask from a generator that was seeded with 32 bits (here 16, to be quick): try all seeds."""
    return (value + np.random.default_rng(int(rng.integers(1 << 16))).integers(1 << 20, size=value.size)) % (1 << 20)


def test_masks_from_small_seeds_are_searched_through():
    """The attacker knows that updates are small numbers, and finds the one seed that leaves such."""
    secret = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    sent = masks_of_32_bits(secret, np.random.default_rng(8))
    found = [
        left
        for seed in range(1 << 16)
        if (left := (sent - np.random.default_rng(seed).integers(1 << 20, size=8)) % (1 << 20)).max() < 1000
    ]
    assert len(found) == 1
    assert (found[0] == secret).all()


def test_masks_of_ours_come_from_256_bits():
    drawn = {keys.secret(SYSTEM) for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(len(one) == 32 for one in drawn)
    with pytest.raises(ValueError, match="key"):
        keys.add_mask(np.zeros(4, dtype=np.uint32), b"\0\0\0\0")


def test_overlapping_lists_would_show_a_client_and_are_not_answered():
    """With both kinds of shares of client 3 the server takes its vector out of its masks; here it gets one kind."""
    count = 4
    round_ = secure.Round(b"x", count, frozenset(range(count)), 3, 8, 20)
    identities = [secure.Identity(keys.secret(SYSTEM)) for _ in range(count)]
    known = {index: one.public for index, one in enumerate(identities)}
    clients = [secure.Client(index, round_, one, known) for index, one in enumerate(identities)]
    advertised = [one.advertise() for one in clients]
    sealed = {one.index: one.share(advertised) for one in clients}
    for one in clients:
        received = {other: texts[one.index] for other, texts in sealed.items() if other != one.index}
        one.mask(np.zeros(8, dtype=np.int64), received)
    both = sum(3 in one._held for one in clients)
    assert both == count  # everyone holds a share of either kind: what a careless client would hand out
    for one in clients:
        with pytest.raises(InvalidArgument, match="twice"):
            one.agree([0, 1, 2, 3, 3])


def granularity(answers):
    coarse = np.ldexp(answers, 53) == np.rint(np.ldexp(answers, 53))
    return np.where(np.abs(answers) < 0.25, np.where(coarse, 1, 2), 0)


def test_float_noise_shows_its_low_bits():
    """Flower's own DP adds np.random's normal numbers: an answer near 0 tells whether the client was there."""
    rng = np.random.default_rng(5)
    stated = accounting.epsilon(Gaussian(noise=3.73), delta=1e-5)

    def floats(value, count):
        return granularity(value + rng.normal(scale=3.73, size=count))

    assert lower_bound(floats, 0.0, 1.0, trials=200_000, delta=1e-5).refutes(stated)


def test_whole_numbers_have_no_low_bits():
    whole = plan(noise=3.73)
    runs, scale = noisy(whole, SURVIVORS), Quantiser(1, 1.0, whole.reach, signs_seed=0).scale
    found = lower_bound(
        lambda value, count: granularity(np.round(runs(value, count)) / scale), 0.0, 1.0, trials=200_000, delta=1e-5
    )
    assert found.epsilon <= accounting.epsilon(Gaussian(noise=3.73), delta=1e-5)


def test_the_number_of_shares_would_tell_who_was_drawn():
    """A mutant that lets only drawn clients give noise: its variance tells how many were, and so who is there."""
    rng, dimension = np.random.default_rng(9), 4000

    def spread(givers, count):
        return np.array([np.std(rng.normal(scale=math.sqrt(givers), size=dimension)) for _ in range(count)])

    found = lower_bound(spread, 5, 4, trials=2000, delta=DELTA)  # one client more is drawn, or not
    assert found.epsilon > 3
    drawn = [len(drawing.draw(plan(clients=20, per_round=8), SYSTEM).giving) for _ in range(50)]
    assert set(drawn) == {8}


class CountsLate(Federation):
    """A round is counted when it is saved, as any training loop does it: after its sum was opened."""

    def _count(self, number):
        pass

    def _save(self, seen):
        if seen > self._kept.count.number:
            self._kept.count.advance(seen)
        super()._save(seen)


@pytest.mark.parametrize(("kind", "opened"), [(CountsLate, [0, 0, 1]), (Federation, [0, 1, 2])])
def test_a_round_that_is_counted_after_its_sum_is_opened_twice(tmp_path, monkeypatch, kind, opened):
    rows, numbers = [(torch.ones(2, 3), torch.tensor([0, 1]))] * 8, []
    whole = federated.Plan(clients=8, per_round=8, rounds=3, clip=1.0, noise=2.0, delta=1e-3)
    adding, stepping = Federation._sum, Federation._step

    def add_and_note(self, number, *others):
        numbers.append(number)
        return adding(self, number, *others)

    def fail_once(self, mean):
        monkeypatch.setattr(Federation, "_step", stepping)
        raise OSError("no room")

    monkeypatch.setattr(Federation, "_sum", add_and_note)
    monkeypatch.setattr(Federation, "_step", fail_once)
    with pytest.raises(OSError, match="no room"):
        kind(torch.nn.Linear(3, 2), whole, rows, checkpoint=tmp_path / "run").fit()
    again = kind(torch.nn.Linear(3, 2), whole, rows, checkpoint=tmp_path / "run")
    while len(numbers) < 3:
        again.round()
    assert numbers == opened
