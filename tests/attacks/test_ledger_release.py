"""Mechanisms that do not say what they cost: refused before they run, or their answer is withheld."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from terrine.errors import InvalidArgument
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger
from terrine.mechanisms import Release

BUDGET = Budget(epsilon=1.0, delta=0.0)
TENTH = PureDP(epsilon=0.1)


@pytest.fixture
def account(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        yield ledger.account("main", budget=BUDGET)


@dataclass
class Answering:
    """Charges a tenth, and answers whatever it was made with."""

    answer: Any
    event: Any = TENTH
    ran: int = 0

    def release(self, value):
        self.ran += 1
        return self.answer


class Eventless:
    value = 4711


@pytest.mark.parametrize("answer", [4711, None, [4711], Eventless(), Release(4711, None), Release(4711, "PureDP")])
def test_an_answer_that_carries_no_event_is_withheld_and_stays_paid_for(account, answer):
    mechanism = Answering(answer)
    with pytest.raises(InvalidArgument, match="carries no event; its answer is withheld") as refusal:
        account.release(mechanism, 1, purpose="count", by="ann")
    assert "4711" not in str(refusal.value)
    assert mechanism.ran == 1
    assert [(one.event, one.purpose, one.by) for one in account.history()] == [(TENTH, "count", "ann")]


@pytest.mark.parametrize("event", [None, "PureDP", 0.1, {"kind": "PureDP", "epsilon": 0.1}, [TENTH], PureDP, object()])
def test_a_mechanism_whose_event_is_none_never_runs(account, event):
    mechanism = Answering(Release(1, TENTH), event=event)
    with pytest.raises(InvalidArgument, match="event"):
        account.release(mechanism, 1)
    with pytest.raises(InvalidArgument, match="event"):
        account.charge(event)
    with pytest.raises(InvalidArgument, match="event"):
        account.would_cost(event)
    assert mechanism.ran == 0
    assert list(account.history()) == []


def test_what_is_no_mechanism_is_refused_before_anything_is_charged(account):
    class NoEvent:
        def release(self, value):
            raise AssertionError("it ran")

    class NoRelease:
        event = TENTH

    for wrong in (NoEvent(), NoRelease(), None, 7, len):
        with pytest.raises(InvalidArgument, match="want a mechanism"):
            account.release(wrong, 1)
    assert list(account.history()) == []


def test_a_mechanism_that_names_its_event_gives_its_answer(account):
    assert account.release(Answering(Release(4711, TENTH)), 1).value == 4711
