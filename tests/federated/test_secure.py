"""Secure sums: right, noisy as billed, and silent where they must be."""

import numpy as np
import pytest

from terrine import federated
from terrine.errors import InvalidArgument, OutOfOrder, TerrineError
from terrine.federated import quantise, secure
from terrine.federated.quantise import Quantiser
from terrine.federated.secure import graph, keys, shamir
from terrine.federated.secure.opening import wraparound
from terrine.rng import SYSTEM, Seeded
from tests.federated.conftest import KINDS, small_plan

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


# -- the sum ----------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("drop", [[], [3], [0, 7]])
def test_the_sum_is_that_of_the_survivors_with_noise_of_the_survivors(kind, drop, vectors):
    plan = small_plan(kind)
    wanted = np.delete(vectors, drop, axis=0).sum(axis=0)
    errors = np.concatenate([secure.sum(vectors, plan, drop=drop) - wanted for _ in range(12)])
    deviation = np.sqrt((8 - len(drop)) / 6)  # times the clipping bound and the noise, both 1
    assert abs(errors.mean()) < 6 * deviation / np.sqrt(errors.size)
    assert 0.75 < errors.std() / deviation < 1.25


@each_kind
def test_a_client_that_falls_silent_last_is_still_counted(kind, vectors):
    plan = small_plan(kind, noise=0.06)
    found = secure.opened(vectors, plan, drop=[1], drop_late=[2])
    assert np.abs(found.value - np.delete(vectors, 1, axis=0).sum(axis=0)).max() < 0.6
    assert found.survivors == 7


@each_kind
def test_too_few_survivors_open_nothing(kind, vectors, monkeypatch):
    opened = []
    monkeypatch.setattr(secure.Server, "open", lambda *_: opened.append(1))
    with pytest.raises(secure.TooFewSurvivors, match="5 clients with noise are left, want 6"):
        secure.sum(vectors, small_plan(kind), drop=[0, 1, 2])
    assert not opened


def test_vectors_are_clipped_and_broken_ones_add_nothing(vectors):
    plan = small_plan(noise=0.06)
    wild = vectors.copy()
    wild[0] *= 1e300
    wild[1] = np.nan
    wanted = vectors[2:].sum(axis=0) + vectors[0] / np.linalg.norm(vectors[0])
    assert np.abs(secure.sum(wild, plan) - wanted).max() < 0.6


def test_more_clients_than_noise_givers_add_no_more_noise():
    plan = small_plan(per_round=6, survivors=6)
    errors = np.concatenate([secure.sum(np.zeros((20, 32)), plan) for _ in range(8)])
    assert 0.7 < errors.std() < 1.3


def test_a_seed_gives_the_same_sum_again(vectors):
    assert (secure.sum(vectors, small_plan(seed=3)) == secure.sum(vectors, small_plan(seed=3))).all()
    assert (secure.sum(vectors, small_plan()) != secure.sum(vectors, small_plan())).any()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (([[1.0], [1.0, 2.0]], small_plan()), "shape"),
        (([["a"]], small_plan()), "vector"),
        (([[1.0]], federated.Plan(clients=4, per_round=2, rounds=1, clip=1.0, noise=1.0, delta=0.1)), "Central"),
        (([], small_plan()), "want 6"),
    ],
)
def test_what_cannot_be_summed_is_refused_in_one_line(arguments, why):
    with pytest.raises(TerrineError, match=why) as refusal:
        secure.sum(*arguments)
    assert "\n" not in str(refusal.value)


def test_indices_of_nobody_are_refused(vectors):
    with pytest.raises(InvalidArgument, match="drop"):
        secure.sum(vectors, small_plan(), drop=[8])


# -- whole numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 5, 64, 1000])
@pytest.mark.parametrize("reach", [40.0, 3000.0])
def test_the_rounded_norm_keeps_its_bound_surely(dimension, reach):
    quantiser = Quantiser(dimension, 0.7, reach, signs_seed=9)
    rng, drawn = np.random.default_rng(1), Seeded(1)
    for scale in (0.0, 1e-9, 0.7, 5.0, 1e200):
        for _ in range(20):
            whole = quantiser.to_integers(rng.normal(size=dimension) * scale, drawn)
            assert int((whole.astype(object) ** 2).sum()) <= reach**2


def test_rounding_is_right_on_average_and_back_again():
    quantiser = Quantiser(6, 1.0, 60.0, signs_seed=2)
    vector = np.array([0.5, -0.2, 0.3, 0.0, 0.1, -0.6])
    mean = np.mean([quantiser.to_real(quantiser.to_integers(vector, SYSTEM)) for _ in range(4000)], axis=0)
    assert np.abs(mean - vector).max() < 0.004


def test_too_few_steps_for_so_many_entries_are_refused():
    with pytest.raises(InvalidArgument, match="bits"):
        _ = Quantiser(10_000, 1.0, 20.0, signs_seed=0).scale


@pytest.mark.parametrize("length", [1, 2, 8, 32, 64, 2048])
def test_the_transform_is_hadamards(length):
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(length)] for row in range(min(length, 40))]
    vector = np.random.default_rng(1).normal(size=length)
    wanted = np.array(signs) @ vector / np.sqrt(length)
    assert np.allclose(quantise.hadamard(vector)[: len(wanted)], wanted)


def test_the_transform_is_its_own_inverse():
    vector = np.random.default_rng(0).normal(size=64)
    assert np.allclose(quantise.hadamard(quantise.hadamard(vector)), vector)
    assert np.isclose(np.linalg.norm(quantise.hadamard(vector)), np.linalg.norm(vector))


def test_wrapping_around_is_noticed():
    plan = small_plan(bits=20)
    assert secure.opened(np.zeros((8, 64)), plan).wrapped < 1e-9
    wide = (np.random.default_rng(1).normal(size=5000) * 200).round().astype(np.int64)
    crossed = (np.abs(wide) >= 512).sum()
    narrow = small_plan(bits=10, noise=0.3)
    assert wraparound((wide + 512) % 1024 - 512, narrow, 8) == pytest.approx(crossed, rel=0.5)
    assert crossed > 20


def test_wrapping_around_of_one_entry_is_noticed():
    """Forty clients of full length where eight were expected: one entry shows no spread, but cannot hold them."""
    plan = small_plan()
    found = secure.opened(np.ones((40, 1)), plan)
    assert abs(found.value[0] - 40) > 10
    assert found.wrapped > 0.9
    assert secure.opened(np.ones((8, 1)), plan).wrapped < 1e-6


# -- shares, keys, neighbours -----------------------------------------------------------------------


def test_shares_give_the_secret_back_and_fewer_do_not():
    secret = bytes(range(32))
    shares = shamir.split(secret, [1, 2, 5, 9], 3, SYSTEM)
    for kept in ([1, 2, 5], [9, 2, 1], [1, 2, 5, 9]):
        assert shamir.join({point: shares[point] for point in kept}, 3) == secret
    with pytest.raises(InvalidArgument, match="want 3"):
        shamir.join({1: shares[1], 2: shares[2]}, 3)
    guesses = {shares_of_two(secret) for _ in range(20)}
    assert len(guesses) == 20  # two shares say nothing: with another polynomial they are others


def shares_of_two(secret):
    shares = shamir.split(secret, [1, 2, 5], 3, SYSTEM)
    return shares[1] + shares[2]


def test_the_field_is_a_prime_field():
    for base in (2, 3, 5, 7, 11, 13):
        assert pow(base, shamir.PRIME - 1, shamir.PRIME) == 1


@pytest.mark.parametrize(("clients", "dropping"), [(5, 0.2), (24, 0.3), (200, 0.1), (1000, 0.1), (1000, 0.3)])
def test_neighbours_are_mutual_and_enough(clients, dropping):
    each = graph.degree(clients, dropping)
    found = graph.neighbours(clients, each, seed=5)
    assert all(len(set(one)) == each for one in found)
    assert all(one in found[other] for one in range(clients) for other in found[one])
    assert each >= min(clients - 1, 2 * np.log2(clients))


def test_few_neighbours_suffice_in_a_large_round():
    assert graph.degree(1000, 0.05) < 40
    plan = small_plan(per_round=40, survivors=36, clients=40, noise=0.2)
    round_ = secure.Round(b"r", 40, frozenset(range(40)), 36, 32, 20, 7)
    assert len(round_.neighbours(0)) < 39
    value = secure.sum(np.full((40, 8), 0.01), plan, drop=[4, 11])
    assert np.abs(value - 0.38).max() < 2.0


def test_masks_are_keystreams_of_256_bit_keys():
    total = np.zeros(1 << 21, dtype=np.uint32)
    keys.add_mask(total, bytes(32))
    assert abs(total.mean() / 2**31 - 1) < 0.01
    keys.add_mask(total, bytes(32), negative=True)
    assert not total.any()


# -- a server that does not do as it should ---------------------------------------------------------


class Table:
    """Four clients who have sent their masked vectors."""

    def __init__(self, clients=4, survivors=3, length=8):
        self.round = secure.Round(b"one", clients, frozenset(range(clients)), survivors, length, 20)
        identities = [secure.Identity(keys.secret(SYSTEM)) for _ in range(clients)]
        known = {index: one.public for index, one in enumerate(identities)}
        self.clients = [secure.Client(index, self.round, one, known) for index, one in enumerate(identities)]
        self.keys = [one.advertise() for one in self.clients]

    def exchanged(self):
        server = secure.Server(self.round)
        server.advertised(self.keys)
        server.shared({one.index: one.share(server.keys_for(one.index)) for one in self.clients})
        for one in self.clients:
            server.add(one.index, one.mask(np.full(8, one.index), server.shares_for(one.index)))
        return server


def test_the_masks_cancel():
    table = Table()
    server = table.exchanged()
    signed = {one.index: one.agree(server.survivors) for one in table.clients}
    total = server.open(one.unmask(server.survivors, signed) for one in table.clients)
    assert (total == 0 + 1 + 2 + 3).all()


def test_a_second_list_is_not_answered():
    table = Table()
    server = table.exchanged()
    signed = {one.index: one.agree(server.survivors) for one in table.clients}
    table.clients[0].unmask(server.survivors, signed)
    with pytest.raises(OutOfOrder, match="once"):
        table.clients[0].unmask([0, 1, 2], signed)
    with pytest.raises(OutOfOrder):
        table.clients[0].agree([0, 1, 2])


def test_another_list_than_was_agreed_to_is_not_answered():
    table = Table()
    table.exchanged()
    signed = {one.index: one.agree([0, 1, 2, 3]) for one in table.clients}
    with pytest.raises(InvalidArgument, match="nothing is unmasked"):
        table.clients[0].unmask([0, 1, 2], signed)


def test_two_lists_cannot_both_be_answered():
    """The server tells half of the clients that client 3 is gone, and the other half that it is there."""
    table = Table()
    table.exchanged()
    signed = {one: table.clients[one].agree([0, 1, 2, 3] if one % 2 else [0, 1, 2]) for one in (0, 1, 2)}
    signed[3] = table.clients[3].agree([0, 1, 2, 3])
    answered = 0
    for one in table.clients:
        try:
            one.unmask([0, 1, 2, 3] if one.index % 2 else [0, 1, 2], signed)
            answered += 1
        except InvalidArgument:
            pass
    assert answered == 0


def test_no_answer_holds_both_kinds_of_shares_of_one_client():
    table = Table()
    server = table.exchanged()
    signed = {one: table.clients[one].agree([0, 1, 2]) for one in (0, 1, 2)}
    for one in (0, 1, 2):
        answer = table.clients[one].unmask([0, 1, 2], signed)
        assert not answer.own.keys() & answer.pairwise.keys()
        assert answer.own.keys() | answer.pairwise.keys() == {0, 1, 2, 3}
    assert server.survivors == [0, 1, 2, 3]


def test_a_list_with_too_little_noise_is_not_agreed_to():
    table = Table()
    table.exchanged()
    with pytest.raises(InvalidArgument, match="2 survivors with noise"):
        table.clients[0].agree([0, 1])


def test_keys_that_the_server_made_up_are_not_used():
    table, other = Table(), Table()
    with pytest.raises(InvalidArgument, match="signed"):
        table.clients[0].share([table.keys[1], table.keys[2], other.keys[3]])


def test_clients_who_were_told_different_facts_do_not_go_on():
    """The server tells one client that another gives no noise."""
    table = Table()
    other = secure.Round(b"one", 4, frozenset({0, 1, 2}), 3, 8, 20)
    identities = {index: one._identity for index, one in enumerate(table.clients)}
    known = {index: one.public for index, one in identities.items()}
    misled = secure.Client(3, other, identities[3], known)
    misled.advertise()
    with pytest.raises(InvalidArgument, match="signed"):
        misled.share(table.keys)


def test_shares_that_were_changed_on_the_way_are_noticed():
    table = Table()
    sealed = [one.share(table.keys) for one in table.clients]
    changed = bytearray(sealed[1][0])
    changed[0] ^= 1
    with pytest.raises(InvalidArgument, match="changed"):
        table.clients[0].mask(np.zeros(8, dtype=np.int64), {1: bytes(changed), 2: sealed[2][0], 3: sealed[3][0]})


def test_a_masked_vector_looks_like_noise_alone():
    """One client's masked zeros: uniform, whatever the vector."""
    table = Table(length=1 << 14)
    server = secure.Server(table.round)
    server.advertised(table.keys)
    server.shared({one.index: one.share(table.keys) for one in table.clients})
    masked = table.clients[0].mask(np.zeros(1 << 14, dtype=np.int64), server.shares_for(0))
    counts = np.bincount(masked >> 15, minlength=32)
    assert ((counts - 512) ** 2 / 512).sum() < 100  # 31 degrees of freedom: one in 10^9 by chance
