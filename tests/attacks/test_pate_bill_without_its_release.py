"""Attack: release the sanitised number, and have the bill print what the labels alone cost."""

import numpy as np
import pytest

from terrine import accounting, pate
from terrine.events import Composed, Reproducible, Unit
from terrine.events.codec import from_dict
from terrine.rng import Seeded

TEACHERS = 400
DEAL = pate.split(4000, TEACHERS, seed=0)
RULES = [
    pate.LaplaceMax(40.0),
    pate.GaussianMax(60.0),
    pate.GaussianMax([50.0] * 30 + [80.0] * 30),
    pate.ConfidentGaussianMax(threshold=300, test_noise=80.0, noise=60.0),
    pate.InteractiveGaussianMax(threshold=100, test_noise=80.0, noise=60.0),
]


def draw(agreement, queries=60, seed=0):
    generator = np.random.default_rng(seed)
    rows = [generator.multinomial(TEACHERS, [agreement, *[(1 - agreement) / 4] * 4]) for _ in range(queries)]
    return pate.Votes(np.stack(rows), DEAL.record())


class Book:
    def __init__(self):
        self.events = []

    def charge(self, event, *, purpose, by, sealed=None):
        self.events.append(event)


def billed(rule, votes, seed=1, **options):
    student = np.full(votes.counts.shape, 0.2) if rule.wants_student else None
    book = Book()
    answers = rule.answer(votes, student=student, rng=Seeded(seed), account=book)
    return book, answers, pate.bill(votes, answers, rule, delta=1e-5, rng=Seeded(seed), account=book, **options)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_printed_number_pays_for_labels_and_release(rule):
    book, answers, found = billed(rule, draw(0.9))
    assert len(book.events) == 2
    both = accounting.epsilon(Composed(book.events), delta=1e-5)
    assert both > accounting.epsilon(answers.event, delta=1e-5)
    assert found.data_independent == pytest.approx(both, rel=1e-9)
    assert found.epsilon == min(found.sanitised, found.data_independent)
    assert from_dict(found.as_json()["event"]) == found.event
    assert accounting.epsilon(found.event, delta=1e-5) == pytest.approx(both, rel=1e-9)


def test_without_a_release_the_labels_are_the_bill():
    book, answers, found = billed(RULES[1], draw(0.9), sanitise=False)
    assert found.epsilon == found.data_independent == accounting.epsilon(answers.event, delta=1e-5)
    assert book.events == [answers.event]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_what_the_release_costs_is_known_before_a_vote_is_cast(rule):
    """A cost that depended on how many were answered could not be charged first."""
    events = set()
    for agreement in (0.3, 0.8, 0.99):
        book, _, _ = billed(rule, draw(agreement))
        events.add(book.events[1])
    assert len(events) == 1
    known = pate.planned_release(rule, queries=60, classes=5, delta=1e-5, unit=Unit.EXAMPLE)
    assert events == {Reproducible(known.event)}
