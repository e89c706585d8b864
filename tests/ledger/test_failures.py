"""Crashes, races, full disks, wrong clocks and broken files: a clear error, nothing lost, nothing released."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import sys
import traceback

import pytest
from sqlalchemy import create_engine, text

from terrine.errors import LedgerDamaged, LedgerUnavailable
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger, schema
from terrine.mechanisms import Release

PURE = Budget(epsilon=1.0, delta=0.0)
TENTH = PureDP(epsilon=0.1)


class Spy:
    """A mechanism that must not run when its charge fails."""

    event = TENTH

    def __init__(self):
        self.ran = 0

    def release(self, value):
        self.ran += 1
        return Release(value, self.event)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        account = ledger.account("main", budget=PURE)
        for _ in range(3):
            account.charge(TENTH)
    return path


def refused(error, match, path, **options):
    """A release on `path` fails with `error`, and the mechanism never ran."""
    spy = Spy()
    with pytest.raises(error, match=match), Ledger.open(path, create=False, **options) as ledger:
        ledger.account("main").release(spy, 1)
    assert spy.ran == 0


def intact(path, charges=3):
    with Ledger.open(path, create=False) as ledger:
        assert len(list(ledger.account("main").history())) == charges
        assert ledger.verify() == []
        ledger.account("main").charge(TENTH)


def in_child(work):
    """Run `work` in a process of its own, whose limits and user may be changed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_kill_9_loses_no_acknowledged_charge_and_no_release_lacks_its_charge(url, bench, tmp_path):
    result = bench.crashes(url, tmp_path, kills=6)
    assert (result["lost"], result["released_without_charge"], result["findings"]) == (0, 0, 0)
    assert result["charges"] >= result["acknowledged"] > 0


def test_the_crash_test_finds_a_release_that_was_not_charged_first(bench, tmp_path, monkeypatch):
    class Careless(bench.Marked):
        def release(self, tag):
            return super().release(tag + "-leaked")

    monkeypatch.setattr(bench, "Marked", Careless)
    result = bench.crashes(f"sqlite:///{tmp_path}/ledger.db", tmp_path, kills=1)
    assert result["released_without_charge"] > 0


def test_sixteen_processes_never_overspend_the_last_tenth(url, bench):
    result = bench.race(url, rounds=8)
    assert (result["overspent"], result["unclaimed"], result["findings"]) == (0, 0, 0)


def test_the_race_finds_a_ledger_that_does_not_lock(bench, tmp_path, monkeypatch):
    # The mutant reads the balance before the transaction: every process believes that its tenth is left.
    from terrine.ledger import Account

    honest = Account.charge

    def hasty(self, event, **options):
        seen = (0, self._balance())
        self._standing = lambda session, head: seen
        return honest(self, event, **options)

    monkeypatch.setattr(Account, "charge", hasty)
    result = bench.race(f"sqlite:///{tmp_path}/ledger.db", rounds=3)
    assert result["overspent"] > 0


def test_the_last_of_many_charges_costs_no_more_than_ten_first_ones(bench, tmp_path):
    # Counted in the bytes that a charge reads and writes, which a busy machine cannot change.
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger:
        ledger.account("old", budget=Budget(epsilon=1000.0, delta=1e-6))
        bench._fill(ledger, "old", PureDP(epsilon=1e-6), 3000)
        account = ledger.account("old")
        account.charge(PureDP(epsilon=1e-6))
        with ledger._store.transaction(write=False) as session:
            rows = list(ledger._store.rows(session, account._row.account))
        assert ledger.verify() == []
    assert len(rows) == 3001
    assert len(rows[-1].state) < 2 * len(rows[0].state)


def test_a_charge_reads_two_rows_however_long_the_history(bench, tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.account("old", budget=Budget(epsilon=1000.0, delta=1e-6))
        bench._fill(ledger, "old", PureDP(epsilon=1e-6), 500)
        plan = []
        with ledger._store.transaction(write=False) as session:
            for wanted in ("ledger_heads WHERE account = 'x'", "ledger_charges WHERE account = 'x' AND sequence = 7"):
                plan += [str(row) for row in session.execute(text(f"EXPLAIN QUERY PLAN SELECT * FROM {wanted}"))]
    assert all("SEARCH" in step for step in plan)


def test_a_full_disk(file):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Ledger.open(file) as ledger:
            account, spy = ledger.account("main"), Spy()
            with sqlite3.connect(file) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
            with pytest.raises(LedgerUnavailable, match=r"full|disk|room"):
                account.release(spy, 1)
            assert spy.ran == 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert len(list(account.history())) == 3
            account.charge(TENTH)  # room again: the same handle goes on

    in_child(work)
    intact(file, charges=4)


def test_no_room_inside_the_database(file, monkeypatch):
    from terrine.ledger import store

    honest = store._prepare_sqlite

    def cramped(connection, record):
        honest(connection, record)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(store, "_prepare_sqlite", cramped)
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        done = 0

        def fill():
            nonlocal done
            while True:
                account.charge(PureDP(epsilon=1e-6), purpose="x" * 9000)
                done += 1

        with pytest.raises(LedgerUnavailable, match="no room to write"):
            fill()
    monkeypatch.undo()
    intact(file, charges=3 + done)


def test_a_read_only_file(file):
    file.chmod(0o444)
    file.parent.chmod(0o555)

    def work():
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        refused(LedgerUnavailable, "writ|open", file)

    for folder in file.parents[: len(file.parents) - 1]:
        if folder != file.parent and os.geteuid() == 0 and folder.stat().st_uid == 0:
            folder.chmod(folder.stat().st_mode | 0o055)  # let the other user come this far
    try:
        in_child(work)
    finally:
        file.parent.chmod(0o755)
        file.chmod(0o644)
    intact(file)


def test_a_locked_database(file):
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    refused(LedgerUnavailable, "another process holds it", file, timeout=0.05)
    holder.execute("ROLLBACK")
    intact(file)


def test_a_locked_account_on_postgresql(postgresql):
    with Ledger.open(postgresql, timeout=0.2) as ledger, Ledger.open(postgresql) as other:
        account = ledger.account("main", budget=PURE)
        other_account = other.account("main")
        with other._store.transaction() as session:
            other._store.lock_head(session, other_account._row.account)
            with pytest.raises(LedgerUnavailable, match="another process holds the account"):
                account.charge(TENTH)
        account.charge(TENTH)


def test_a_clock_that_jumps_back(url):
    now = [1_800_000_000.0]
    with Ledger.open(url, clock=lambda: now[0]) as ledger:
        account, spy = ledger.account("main", budget=PURE), Spy()
        account.charge(TENTH)
        now[0] -= 3600
        with pytest.raises(LedgerUnavailable, match="the clock stands 3600 s before the last charge"):
            account.release(spy, 1)
        assert spy.ran == 0
        with pytest.raises(LedgerUnavailable, match="the clock stands"):
            ledger.account("main").charge(TENTH)  # a fresh handle reads the time from the row
        now[0] += 3598
        account.charge(TENTH)  # a small step is evened out
        times = [one.at for one in account.history()]
        assert times[0] == times[1]
        assert ledger.verify() == []
        now[0] -= 10_000
        with Ledger.open(url, clock=lambda: now[0], clock_tolerance=1e6) as lenient:
            lenient.account("main").charge(TENTH)
            assert lenient.verify() == []


def test_a_ledger_from_a_newer_version(url):
    with Ledger.open(url) as ledger:
        ledger.account("main", budget=PURE).charge(TENTH)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE ledger_meta SET version = 99"))
    refused(LedgerUnavailable, "version 99: this Terrine reads up to 1; upgrade", url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE ledger_meta SET version = 1"))
    engine.dispose()
    intact(url, charges=1)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.95])
def test_a_truncated_file(file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    refused(LedgerDamaged, "damaged|empty file|not a ledger|no table", file)
    with pytest.raises(LedgerDamaged):
        Ledger.open(file)  # not even `create` begins anew over the remains
    file.write_bytes(whole)
    intact(file)


def test_a_file_that_is_something_else(tmp_path):
    path = tmp_path / "ledger.db"
    path.write_text("not a database, but long enough to have a header of some kind " * 50)
    refused(LedgerDamaged, "not a ledger", path)


def test_a_file_that_was_removed_while_its_log_stayed(file):
    log = file.with_name(file.name + "-wal")
    log.write_bytes(b"x")
    file.unlink()
    with pytest.raises(LedgerDamaged, match="its log is still there"):
        Ledger.open(file)


def test_missing_tables_are_damage_not_a_new_ledger(file):
    with sqlite3.connect(file) as connection:
        connection.execute("DROP TABLE ledger_meta")
    with pytest.raises(LedgerDamaged, match="no table ledger_meta"):
        Ledger.open(file)


def test_places_that_are_not_there(tmp_path):
    with pytest.raises(LedgerUnavailable):
        Ledger.open(tmp_path / "no" / "such" / "folder.db")
    with pytest.raises(LedgerUnavailable, match="create"):
        Ledger.open(tmp_path / "none.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_server_is_one_clear_line_without_the_password():
    pytest.importorskip("psycopg")
    with pytest.raises(LedgerUnavailable) as found:
        Ledger.open("postgresql+psycopg://someone:secret@127.0.0.1:1/none", timeout=1)
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)


def test_migrations_run_once_in_order_and_undo_on_failure(url):
    Ledger.open(url).close()
    second = schema.Migration(2, ("CREATE TABLE ledger_extra (one BIGINT)",))
    broken = schema.Migration(3, ("CREATE TABLE ledger_more (one BIGINT)", "NOT SQL"))
    with Ledger.open(url) as ledger:
        with ledger._store.transaction() as session:
            schema.migrate(session.connection, (*schema.MIGRATIONS, second))
        with pytest.raises(LedgerUnavailable, match="upgrade it"):
            Ledger.open(url)
        with ledger._store.transaction() as session:
            session.execute(text("UPDATE ledger_meta SET version = 1"))
        with pytest.raises(LedgerUnavailable), ledger._store.transaction() as session:
            schema.migrate(session.connection, (*schema.MIGRATIONS, broken))
        with ledger._store.transaction() as session:
            assert schema.found_version(session.connection) == 1
    Ledger.open(url).close()


def test_a_fork_does_not_share_its_parents_connection(url):
    with Ledger.open(url) as ledger:
        account = ledger.account("main", budget=PURE)
        account.charge(TENTH)
        in_child(lambda: account.charge(TENTH))
        account.charge(TENTH)
        assert account.spent(0.0) == 0.3
        assert ledger.verify() == []
