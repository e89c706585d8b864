"""Attack: ask for a bill at a delta at which none can be drawn, and have the ledger pay for a traceback."""

import math
from fractions import Fraction

import numpy as np
import pytest

from terrine import pate
from terrine.errors import InvalidArgument
from terrine.rng import Seeded

DEAL = pate.split(4000, 400, seed=0)
RULE = pate.GaussianMax(60.0)


class Book:
    def __init__(self):
        self.events = []

    def charge(self, event, *, purpose, by, sealed=None):
        self.events.append(event)


def billed(**options):
    rows = np.random.default_rng(0).multinomial(400, [0.9, 0.05, 0.05], size=20)
    votes, book = pate.Votes(rows, DEAL.record()), Book()
    answers = RULE.answer(votes, rng=Seeded(1))
    try:
        return book, pate.bill(votes, answers, RULE, rng=Seeded(1), account=book, **options)
    except InvalidArgument as refusal:
        return book, str(refusal)


@pytest.mark.parametrize("delta", [1e-11, 2.0**-33, 1e-200])
def test_a_delta_that_rounding_takes_is_refused_before_the_charge(delta):
    book, said = billed(delta=delta)
    assert "delta=" in said
    assert "\n" not in said
    assert book.events == []


def test_just_above_it_and_without_the_release_there_is_a_bill():
    book, found = billed(delta=2.0**-33 * 1.01)
    assert len(book.events) == 1
    assert math.isfinite(found.epsilon)
    book, found = billed(delta=1e-11, sanitise=False)
    assert book.events == []
    assert math.isfinite(found.epsilon)


@pytest.mark.parametrize("order", [1.0, 0.5])
def test_an_order_that_is_none_is_refused_before_the_charge(order):
    book, said = billed(delta=1e-5, order=order)
    assert "order=" in said
    assert book.events == []


@pytest.mark.parametrize("value", [5e-14, 1.00000000000005, 0.30000000000004, 2.5])
def test_no_printed_number_is_below_its_value(value):
    found = pate.Bill(1e-5, 1, 1, RULE.event(1, 1), value, value, 1e-3, 2.0, pate.Sealed(1.0))
    lines = [line for line in str(found).splitlines() if "epsilon " in line]
    assert len(lines) == 2
    for line in lines:
        assert Fraction(line.split("epsilon ")[1].split()[0]) >= Fraction(value)
