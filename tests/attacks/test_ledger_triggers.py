"""A trigger in the database that undoes every further charge, and leaves all hashes in order."""

import sqlite3

import pytest

from terrine.errors import LedgerDamaged
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger

UNDO = "DELETE FROM ledger_charges WHERE sequence > 1"
TRIGGER = f"CREATE TRIGGER undo AFTER INSERT ON ledger_charges WHEN new.sequence > 1 BEGIN {UNDO}; END"
VIEW = "CREATE VIEW shown AS SELECT * FROM ledger_charges"


@pytest.mark.parametrize("planted", [TRIGGER, VIEW])
def test_a_database_with_code_of_its_own_is_refused(tmp_path, planted):
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        ledger.account("clinic", budget=Budget(1.0, 0.0)).charge(PureDP(epsilon=0.1))
    with sqlite3.connect(path) as database:
        database.execute(planted)
    with pytest.raises(LedgerDamaged, match="did not make"), Ledger.open(path) as ledger:
        ledger.account("clinic").charge(PureDP(epsilon=0.9))


def test_a_trigger_planted_under_an_open_ledger_is_found_at_the_next_charge(tmp_path):
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        account = ledger.account("clinic", budget=Budget(1.0, 0.0))
        account.charge(PureDP(epsilon=0.1))
        with sqlite3.connect(path) as database:
            database.execute(TRIGGER)
        with pytest.raises(LedgerDamaged, match="did not make"):
            account.charge(PureDP(epsilon=0.1))
