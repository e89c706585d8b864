"""Whoever edits, drops, adds or reorders a row is found, and the finding says which row."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from fractions import Fraction

import pytest
from sqlalchemy import create_engine, text

from terrine.accounting.costs import price
from terrine.accounting.filters import Terms
from terrine.errors import LedgerDamaged
from terrine.events import Budget, Gaussian, PureDP, to_json
from terrine.ledger import Ledger
from terrine.ledger.records import ChargeRow, digest, hashed, read_cost, read_state, write_cost, write_state

BUDGET = Budget(epsilon=1.0, delta=1e-5)
ORDERS = Terms.of(BUDGET).orders


@pytest.fixture
def filled(url):
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=BUDGET)
        for number in range(6):
            account.charge(Gaussian(noise=40.0 + number), purpose=f"count {number}")
        ledger.account("other", budget=BUDGET, partitions=["a", "b"]).charge(PureDP(epsilon=0.2), partition="a")
    return url


def change(url, *statements):
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def findings(url):
    with Ledger.open(url) as ledger:
        return ledger.verify()


MAIN = "account = (SELECT account FROM ledger_accounts WHERE name = 'main')"


def test_an_honest_ledger_has_no_findings(filled):
    assert findings(filled) == []


@pytest.mark.parametrize(
    "column", ["event", "purpose", "by", "partition", "cost", "state", "sealed", "previous", "hash"]
)
def test_one_edited_field_is_found_at_its_row(filled, column):
    change(filled, f"""UPDATE ledger_charges SET "{column}" = 'x' WHERE sequence = 3 AND {MAIN}""")
    found = findings(filled)
    assert {one.account for one in found} == {"main"}
    assert found[0].sequence == 3
    assert any("edited" in one.problem for one in found)


def test_an_edited_time_is_found(filled):
    change(filled, f"UPDATE ledger_charges SET at = at - 1 WHERE sequence = 3 AND {MAIN}")
    assert [one.sequence for one in findings(filled)] == [3, 3][: len(findings(filled))]


@pytest.mark.parametrize("sequence", [1, 3])
def test_a_dropped_row_is_found(filled, sequence):
    change(filled, f"DELETE FROM ledger_charges WHERE sequence = {sequence} AND {MAIN}")
    found = findings(filled)
    assert found[0].sequence == sequence + 1
    assert "dropped" in found[0].problem


def test_a_dropped_last_row_is_found_and_nothing_more_is_charged(filled):
    change(filled, f"DELETE FROM ledger_charges WHERE sequence = 6 AND {MAIN}")
    assert str(findings(filled)[0]).startswith("account 'main', charge 6: dropped")
    with Ledger.open(filled) as ledger, pytest.raises(LedgerDamaged, match="charge 6 is gone"):
        ledger.account("main").charge(Gaussian(noise=50.0))


def test_reordered_rows_are_found(filled):
    change(
        filled,
        f"UPDATE ledger_charges SET sequence = 99 WHERE sequence = 2 AND {MAIN}",
        f"UPDATE ledger_charges SET sequence = 2 WHERE sequence = 4 AND {MAIN}",
        f"UPDATE ledger_charges SET sequence = 4 WHERE sequence = 99 AND {MAIN}",
    )
    assert {2, 4} <= {one.sequence for one in findings(filled)}


def test_a_dropped_account_is_found(filled):
    ids = "(SELECT account FROM ledger_accounts WHERE name = 'other')"
    change(
        filled,
        f"DELETE FROM ledger_charges WHERE account = {ids}",
        f"DELETE FROM ledger_heads WHERE account = {ids}",
        "DELETE FROM ledger_accounts WHERE name = 'other'",
    )
    assert "1 accounts are here, 2 were opened" in str(findings(filled)[0])


def test_a_raised_budget_is_found_and_refused(filled):
    change(filled, """UPDATE ledger_accounts SET terms = replace(terms, '"epsilon": 1.0', '"epsilon": 9.0')""")
    assert "the declaration was edited" in findings(filled)[0].problem
    with Ledger.open(filled) as ledger, pytest.raises(LedgerDamaged, match="declaration was edited"):
        ledger.account("main")


def test_an_edited_last_state_is_never_built_upon(filled):
    change(filled, f"""UPDATE ledger_charges SET state = replace(state, '"events": 6', '"events": 5') WHERE {MAIN}""")
    with Ledger.open(filled) as ledger, pytest.raises(LedgerDamaged, match="charge 6"):
        ledger.account("main").charge(Gaussian(noise=50.0))


def rewritten(url, edit):
    """A forger who knows the hash: change one row, then chain everything after it again."""
    with Ledger.open(url) as ledger:
        store = ledger._store
        with store.transaction() as session:
            account = store.accounts(session, "main")[0]
            rows = [edit(row) for row in store.rows(session, account.account)]
            session.execute(text(f"DELETE FROM ledger_charges WHERE {MAIN}"))
            previous = account.hash
            for row in rows:
                again = hashed(row._replace(previous=previous))
                store.append(session, again)
                previous = again.hash


def test_a_forger_who_chains_again_still_has_to_get_the_price_right(filled):
    def cheaper(row):
        cost = read_cost(row.cost, ORDERS)
        return row._replace(cost=write_cost(dataclasses.replace(cost, mu_squared=cost.mu_squared / 2)))

    rewritten(filled, lambda row: cheaper(row) if row.sequence == 4 else row)
    problems = [one.problem for one in findings(filled) if one.sequence == 4]
    assert any("mispriced" in one for one in problems)
    assert any("running sum" in one for one in problems)


def test_an_overspent_row_is_found_even_if_everything_else_is_in_order(filled):
    rewritten(filled, lambda row: row._replace(event=to_json(Gaussian(noise=0.5))) if row.sequence == 2 else row)
    problems = [one.problem for one in findings(filled) if one.sequence == 2]
    assert any("overspent" in one for one in problems)
    assert any("mispriced" in one for one in problems)


def test_every_field_is_under_the_hash():
    row = ChargeRow("a", 1, 2, "e", "p", "b", "", "c", "s", "", "prev")
    for name in ChargeRow._fields:
        if name != "hash":
            value = getattr(row, name)
            other = row._replace(**{name: value + 1 if isinstance(value, int) else value + "x"})
            assert digest(other) != digest(row), name
    assert digest(row._replace(purpose="pb", by="")) != digest(row)


@pytest.mark.parametrize("purpose", ["", "plain", 'quo"te\\', "üñí \U0001f600", "tab\tline\n\x7f"])
def test_the_hash_is_that_of_the_fields_as_json(purpose):
    row = ChargeRow("a", 1, 2**60, "{}", purpose, "b", "", "c", "s", "", "prev")
    assert digest(row) == hashlib.sha256(json.dumps(["ChargeRow", *row[:-1]]).encode()).hexdigest()
    assert hashed(row) == row._replace(hash=digest(row))


def test_a_forged_common_sum_is_found(url):
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=BUDGET, partitions=["a", "b"])
        for partition in ("", "a", "b"):
            account.charge(PureDP(epsilon=0.2), partition=partition)

    def forged(row):
        own, common = read_state(row.state, ORDERS)
        return row._replace(state=write_state(own, common and dataclasses.replace(common, epsilon=Fraction(0))))

    rewritten(url, forged)
    assert {one.sequence for one in findings(url)} == {2, 3}


def test_costs_round_trip_bit_for_bit(filled):
    with Ledger.open(filled) as ledger, ledger._store.transaction(write=False) as session:
        for account in ledger._store.accounts(session):
            for row in ledger._store.rows(session, account.account):
                assert write_cost(read_cost(row.cost, ORDERS)) == row.cost
                assert write_state(*read_state(row.state, ORDERS)) == row.state
    for wrong in ("", "{}", '{"epsilon": "1/0"}', json.dumps({"epsilon": "x"})):
        with pytest.raises(LedgerDamaged):
            read_cost(wrong, ORDERS)
    good = json.loads(write_cost(price(Gaussian(noise=2.0), (2.0, 3.0))))
    for curve in ("7ff8000000000000" * 2, "bff0000000000000" * 2, "zz", "3ff0", None):
        with pytest.raises(LedgerDamaged):
            read_cost(json.dumps(good | {"renyi": curve}), (2.0, 3.0))
