"""The bill: safe numbers are printed, the sealed one is not, and the sanitised one is honest about itself."""

import copy
import json
import pickle

import numpy as np
import pytest

from terrine import accounting, pate
from terrine.errors import InvalidArgument
from terrine.rng import Seeded

TEACHERS = 400
DEAL = pate.split(4000, TEACHERS, seed=0)
RULES = [
    pate.LaplaceMax(20.0),
    pate.GaussianMax(25.0),
    pate.GaussianMax([25.0] * 30 + [40.0] * 30),
    pate.ConfidentGaussianMax(threshold=300, test_noise=60.0, noise=25.0),
]


def draw(agreement, queries=60, seed=0):
    generator = np.random.default_rng(seed)
    rows = [generator.multinomial(TEACHERS, [agreement, *[(1 - agreement) / 4] * 4]) for _ in range(queries)]
    return pate.Votes(np.stack(rows), DEAL.record())


def billed(rule, votes, seed=1, **options):
    answers = rule.answer(votes, rng=Seeded(seed))
    return pate.bill(votes, answers, rule, delta=1e-5, rng=Seeded(seed), **options)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_vote_dependent_bill_is_below_the_certified_one_and_the_sanitised_one_above_the_truth(rule):
    found = billed(rule, draw(0.95))
    assert 0 < found.sealed.unsafe_open() < found.data_independent
    assert found.sanitised > found.sealed.unsafe_open()
    assert found.epsilon == min(found.data_independent, found.sanitised)
    assert found.data_independent > accounting.epsilon(rule.event(60), delta=1e-5)  # the release is paid for too


def test_the_sanitised_bill_moves_with_its_noise_and_is_rarely_below_what_it_hides():
    rule, votes = pate.GaussianMax(25.0), draw(0.95)
    answers = rule.answer(votes, rng=Seeded(0))
    found = [pate.bill(votes, answers, rule, delta=1e-5, rng=Seeded(seed), failure=0.2) for seed in range(60)]
    values = [one.sanitised for one in found]
    assert len(set(values)) > 20
    # The truth: the same order, with the release's own cost. 60 draws at 20% each: 25 or more have odds below 1e-4.
    sharp = [pate.bill(votes, answers, rule, delta=1e-5, rng=Seeded(seed), failure=1e-6) for seed in range(5)]
    assert np.mean([one.sanitised for one in sharp]) > np.mean(values)
    truth = found[0].sealed.unsafe_open()
    assert sum(value < truth for value in values) < 25


def test_nothing_printable_depends_on_the_votes_except_through_the_release():
    """Two very different ensembles, no sanitised number: every printable form is the same."""
    rule = pate.GaussianMax(25.0)
    texts = set()
    for agreement in (0.5, 0.99):
        votes = draw(agreement)
        answers = rule.answer(votes, rng=Seeded(0))
        found = pate.bill(votes, answers, rule, delta=1e-5, sanitise=False)
        texts.add((repr(found), str(found), json.dumps(found.as_json())))
    assert len(texts) == 1


def test_a_sealed_number_does_not_get_out_by_accident():
    sealed = billed(pate.GaussianMax(25.0), draw(0.95)).sealed
    secret = repr(sealed.unsafe_open())[:8]
    for text in (repr(sealed), str(sealed), f"{sealed}", "%s" % sealed, f"{[sealed]}"):  # noqa: UP031
        assert secret not in text
    for escape in (float, json.dumps, pickle.dumps, copy.copy, lambda one: one + 1, lambda one: one < 1):
        with pytest.raises((TypeError, InvalidArgument)):
            escape(sealed)


def test_the_sealed_number_goes_into_the_ledger_before_the_release():
    seen = []

    class Book:
        def charge(self, event, *, purpose, by, sealed=None):
            seen.append((event, sealed))

    found = billed(pate.GaussianMax(25.0), draw(0.95), account=Book())
    ((event, sealed),) = seen
    assert json.loads(sealed)["pate-data-dependent-epsilon"] == found.sealed.unsafe_open()
    assert accounting.epsilon(event, delta=1e-5) > 0


def test_a_bill_for_other_votes_or_shared_teachers_is_refused():
    rule, votes = pate.GaussianMax(25.0), draw(0.9)
    answers = rule.answer(votes, rng=Seeded(0))
    with pytest.raises(InvalidArgument, match="60 answers for 5 queries"):
        pate.bill(votes.take(range(5)), answers, rule, delta=1e-5)
    shared = votes.deal | {"kind": "subsampled", "most_parts": 9}
    with pytest.raises(InvalidArgument, match="not disjoint"):
        pate.bill(pate.Votes(votes.counts, shared), answers, rule, delta=1e-5)


def test_printed_numbers_are_rounded_up():
    found = billed(pate.GaussianMax(25.0), draw(0.95), sanitise=False)
    shown = float(str(found).split("epsilon ")[1].split()[0])
    assert shown >= found.data_independent > shown - 2e-4
    assert "for tests only" in str(found)


@pytest.mark.parametrize("with_key", [True, False])
def test_a_real_ledger_is_charged_and_keeps_the_sealed_number(tmp_path, with_key):
    ledger = pytest.importorskip("terrine.ledger")
    from terrine.events import Budget, Neighbours, Unit

    key = ledger.new_key() if with_key else None
    with ledger.Ledger.open(str(tmp_path / "book.db"), key=key) as book:
        account = book.account("pate", budget=Budget(50.0, 1e-3), unit=Unit.EXAMPLE, neighbours=Neighbours.REPLACE_ONE)
        rule, votes = pate.GaussianMax(25.0), draw(0.95)
        answers = rule.answer(votes, account=account)
        found = pate.bill(votes, answers, rule, delta=1e-5, account=account)
        history = list(account.history())
        assert [charge.sealed for charge in history] == [False, with_key]
        assert account.spent(1e-3) > 0
        if with_key:
            assert json.loads(account.unseal(2))["pate-data-dependent-epsilon"] == found.sealed.unsafe_open()
