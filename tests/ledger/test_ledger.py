"""What an account promises, over every store."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import pytest

from terrine import accounting
from terrine.accounting.filters import DeltaShares, Filter
from terrine.errors import BudgetExceeded, InvalidArgument, LedgerDamaged, UnsupportedEvent
from terrine.events import (
    ApproximateDP,
    Budget,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    Neighbours,
    NonPrivate,
    PoissonSampled,
    PureDP,
    Repeated,
    Reproducible,
    Unit,
)
from terrine.ledger import Ledger, new_key

PURE = Budget(epsilon=1.0, delta=0.0)
BUDGET = Budget(epsilon=1.0, delta=1e-5)


def test_charges_survive_and_the_budget_is_kept_to_the_last_bit(url):
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=PURE)
        for _ in range(7):
            account.charge(PureDP(epsilon=0.1), purpose="count", by="ann")
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=PURE)
        for _ in range(3):
            account.charge(PureDP(epsilon=0.1))
        with pytest.raises(BudgetExceeded, match="nothing was charged"):
            account.charge(PureDP(epsilon=1e-9))
        assert account.spent(0.0) == 1.0
        assert account.remaining().share == 0.0
        history = list(account.history())
        assert [one.sequence for one in history] == list(range(1, 11))
        assert (history[0].purpose, history[0].by, history[0].event) == ("count", "ann", PureDP(epsilon=0.1))
        assert ledger.verify() == []


def test_an_account_is_the_filter_with_a_memory(url):
    events = [Gaussian(noise=30.0), Laplace(noise=20.0), ApproximateDP(epsilon=0.05, delta=1e-7)]
    events.append(Repeated(PoissonSampled(Gaussian(noise=2.0), rate=0.01), times=50))
    filter_ = Filter(BUDGET)
    with Ledger.open(url) as ledger:
        for event in events:
            account = ledger.account("main", budget=BUDGET)  # a fresh handle: the state comes from the rows
            assert account.would_cost(event) == filter_.would_cost(event)
            account.charge(event)
            filter_.charge(event)
            assert account.spent(1e-5) == filter_.spent(1e-5)
            assert account.remaining() == filter_.remaining()
        report = account.report()
        assert report.adaptive == filter_.spent(1e-5)
        assert report.decides == "filter"
        assert report.charges == 4
        assert ledger.verify() == []


def test_two_handles_see_each_other(url):
    with Ledger.open(url) as one, Ledger.open(url) as two:
        first, second = one.account("main", budget=PURE), two.account("main")
        first.charge(PureDP(epsilon=0.5))
        second.charge(PureDP(epsilon=0.5))
        with pytest.raises(BudgetExceeded):
            first.charge(PureDP(epsilon=0.1))
        assert one.verify() == []


def test_a_calibrated_plan_fits_exactly_and_closes_the_account(url):
    def plan(noise):
        return Repeated(PoissonSampled(Gaussian(noise=noise), rate=0.02), times=500)

    event = plan(accounting.calibrate(plan, BUDGET))
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=BUDGET)
        account.charge(event, purpose="one training run")
        assert account.report().decides == "plan"
        assert account.spent() <= 1.0
        with pytest.raises(BudgetExceeded, match="a plan holds the whole budget"):
            ledger.account("main").charge(PureDP(epsilon=1e-9))
        assert ledger.verify() == []


def test_refused_and_unsupported_events_leave_nothing(url):
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=BUDGET)
        with pytest.raises(BudgetExceeded):
            account.charge(NonPrivate())
        with pytest.raises((UnsupportedEvent, BudgetExceeded)):
            account.charge(Repeated(PoissonSampled(NonPrivate(), rate=0.5), times=3))
        assert list(account.history()) == []
        assert account.spent() == 0.0


def test_partitions_cost_their_maximum_and_the_whole_costs_everyone(url):
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=PURE, partitions=["north", "south", "west"])
        account.charge(PureDP(epsilon=0.6), partition="north")
        account.charge(PureDP(epsilon=0.6), partition="south")
        assert account.spent(0.0) == 0.6
        account = ledger.account("main")
        account.charge(PureDP(epsilon=0.3))
        assert account.spent(0.0) == pytest.approx(0.9)
        assert account.remaining(partition="west").epsilon == pytest.approx(0.7)
        assert account.remaining().epsilon == pytest.approx(0.1)
        with pytest.raises(BudgetExceeded):
            account.charge(PureDP(epsilon=0.2), partition="north")
        with pytest.raises(BudgetExceeded):
            account.charge(PureDP(epsilon=0.2))
        account.charge(PureDP(epsilon=0.7), partition="west")
        with pytest.raises(InvalidArgument, match="want one of north, south, west"):
            account.charge(PureDP(epsilon=0.1), partition="east")
        assert account.report(1e-9).planned == pytest.approx(1.0, rel=1e-3)
        assert ledger.verify() == []


def test_disjointness_is_declared_at_opening_or_never(url):
    with Ledger.open(url) as ledger:
        ledger.account("main", budget=PURE)
        with pytest.raises(InvalidArgument, match="never changes"):
            ledger.account("main", partitions=["a", "b"])
        with pytest.raises(InvalidArgument, match="declared when it is opened"):
            ledger.account("main").charge(PureDP(epsilon=0.1), partition="a")
        with pytest.raises(InvalidArgument, match="may move it to another partition"):
            ledger.account("other", budget=PURE, partitions=["a"], neighbours=Neighbours.REPLACE_ONE)
        with pytest.raises(InvalidArgument, match="different names"):
            ledger.account("other", budget=PURE, partitions=["a", "a"])
        assert [one.name for one in ledger.accounts()] == ["main"]


def test_what_was_declared_never_changes(url):
    with Ledger.open(url) as ledger:
        ledger.account("main", budget=BUDGET, unit=Unit.PERSON)
        ledger.account("main", budget=BUDGET, unit=Unit.PERSON, neighbours=Neighbours.ADD_REMOVE, split=DeltaShares())
        for other in (
            {"budget": Budget(epsilon=2.0, delta=1e-5)},
            {"unit": Unit.CLIENT},
            {"neighbours": Neighbours.REPLACE_ONE},
            {"split": DeltaShares(failures=0.0)},
        ):
            with pytest.raises(InvalidArgument, match="never changes"):
                ledger.account("main", **other)
        with pytest.raises(InvalidArgument, match="give budget"):
            ledger.account("nobody")


def test_an_event_for_others_is_refused(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        account = ledger.account("main", budget=BUDGET, unit=Unit.PERSON, neighbours=Neighbours.REPLACE_ONE)
        with pytest.raises(InvalidArgument, match="stated under add-remove neighbours"):
            account.charge(Gaussian(noise=100.0))
        with pytest.raises(InvalidArgument, match="protects one example"):
            account.charge(FixedSizeSampled(Gaussian(noise=100.0), size=1, population=10))
        account.charge(Gaussian(noise=100.0, unit=Unit.PERSON, neighbours=Neighbours.REPLACE_ONE))


@dataclass(frozen=True)
class Mechanism:
    event: object
    billed: object = None

    def release(self, value, rng=None):
        seen.append(value)
        return Release(value + 1, self.billed or self.event)


@dataclass(frozen=True)
class Release:
    value: int
    event: object


@dataclass(frozen=True)
class Seeded:
    reproducible: bool = True


seen: list[int] = []


def test_release_charges_first_and_a_refused_mechanism_never_sees_the_value(tmp_path):
    seen.clear()
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        account = ledger.account("main", budget=PURE)
        answer = account.release(Mechanism(PureDP(epsilon=0.9)), 41, purpose="the answer")
        assert answer.value == 42
        with pytest.raises(BudgetExceeded):
            account.release(Mechanism(PureDP(epsilon=0.9)), 43)
        assert seen == [41]
        with pytest.raises(InvalidArgument, match="its answer is withheld"):
            account.release(Mechanism(PureDP(epsilon=0.01), billed=PureDP(epsilon=0.05)), 44)
        rng = Seeded()
        stamped = Mechanism(PureDP(epsilon=0.01), billed=Reproducible(PureDP(epsilon=0.01)))
        account.release(stamped, 45, rng=rng)
        assert account.report().reproducible
        assert [one.purpose for one in account.history()] == ["the answer", "Mechanism", "Mechanism"]


class Failing:
    event = PureDP(epsilon=0.1)

    def release(self, value):
        raise RuntimeError("boom")


def test_a_mechanism_that_fails_has_wasted_its_charge(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        account = ledger.account("main", budget=PURE)
        with pytest.raises(RuntimeError):
            account.release(Failing(), 1)
        assert account.spent(0.0) == 0.1


def test_sealed_fields_are_for_the_owner_alone(url, tmp_path):
    key, bill = new_key(), "the data-dependent bill is 0.8341062957"
    with Ledger.open(url, key=key) as ledger:
        account = ledger.account("main", budget=PURE)
        account.charge(PureDP(epsilon=0.1), sealed=bill)
        account.charge(PureDP(epsilon=0.1))
        assert account.unseal(1).decode() == bill
        assert [one.sealed for one in account.history()] == [True, False]
        with pytest.raises(InvalidArgument, match="no sealed field"):
            account.unseal(2)
        exported = io.StringIO()
        ledger.export(exported)
        listing = repr(list(account.history())) + repr(account.report()) + exported.getvalue()
        assert "8341062957" not in listing
    if url.startswith("sqlite"):
        assert b"8341062957" not in (tmp_path / "ledger.db").read_bytes()
    with Ledger.open(url) as ledger:
        with pytest.raises(InvalidArgument, match="without a key"):
            ledger.account("main").unseal(1)
        with pytest.raises(InvalidArgument, match="without a key"):
            ledger.account("main").charge(PureDP(epsilon=0.1), sealed=bill)
    with Ledger.open(url, key=new_key()) as ledger, pytest.raises(LedgerDamaged, match="another key"):
        ledger.account("main").unseal(1)


@pytest.mark.parametrize("length", [0, 1, 254, 255, 256, 600])
def test_sealing_round_trips_and_hides_the_length(tmp_path, length):
    with Ledger.open(tmp_path / "ledger.db", key=new_key()) as ledger:
        account = ledger.account("main", budget=PURE)
        account.charge(PureDP(epsilon=0.1), sealed=b"\x80\x00" * (length // 2) + b"\x00" * (length % 2))
        assert account.unseal(1) == b"\x80\x00" * (length // 2) + b"\x00" * (length % 2)


def test_export_and_import_are_bit_for_bit_across_stores(url, tmp_path):
    with Ledger.open(url, key=new_key()) as ledger:
        account = ledger.account("main", budget=BUDGET, partitions=["a", "b"])
        for number in range(20):
            account.charge(
                Gaussian(noise=50.0 + number), partition="ab"[number % 2], purpose=f"üñí {number}", sealed="x"
            )
        ledger.account("second", budget=PURE).charge(PureDP(epsilon=0.3))
        first = io.StringIO()
        assert ledger.export(first) == 25
    with Ledger.open(tmp_path / "copy.db") as copy:
        first.seek(0)
        assert copy.import_(first) == 25
        second = io.StringIO()
        copy.export(second)
        assert second.getvalue() == first.getvalue()
        assert copy.verify() == []
        first.seek(0)
        with pytest.raises(InvalidArgument, match="already in this ledger"):
            copy.import_(first)
        copy.account("second").charge(PureDP(epsilon=0.7))
        assert copy.verify() == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"noise\\": 50.0', '"noise\\": 5000.0', "charge 1: edited"),
        ('"terrine-ledger": 1', '"terrine-ledger": 9', "line 1"),
        ('"charge"', '"unknown"', "line 3"),
        ('"sequence": 1', '"sequence": "1"', "line 3: sequence is not of its type"),
    ],
)
def test_an_export_that_was_changed_is_not_imported(tmp_path, old, new, problem):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.account("main", budget=BUDGET).charge(Gaussian(noise=50.0))
        file = io.StringIO()
        ledger.export(file)
    assert old in file.getvalue()
    with Ledger.open(tmp_path / "copy.db") as copy:
        with pytest.raises(LedgerDamaged, match=problem):
            copy.import_(io.StringIO(file.getvalue().replace(old, new, 1)))
        assert copy.accounts() == []


@pytest.mark.parametrize("name", ["", "a\x00b", "x" * 10_001, 7, "\ud800"])
def test_names_that_no_database_could_hold_are_refused(tmp_path, name):
    with Ledger.open(tmp_path / "ledger.db") as ledger, pytest.raises(InvalidArgument, match="want text"):
        ledger.account(name, budget=PURE)


@pytest.mark.parametrize("where", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "://"])
def test_places_that_forget_are_refused(where):
    with pytest.raises(InvalidArgument, match="url"):
        Ledger.open(where)


def test_spent_at_a_delta_the_filter_cannot_reach_is_infinite_not_small(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        account = ledger.account("main", budget=BUDGET)
        account.charge(Gaussian(noise=50.0))
        assert account.spent(0.0) == math.inf
        assert account.spent(1e-12) > account.spent(1e-3) > 0
