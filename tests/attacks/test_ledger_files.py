"""Other users of the machine, and files that are moved, replaced or removed under an open ledger."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

import pytest

from terrine.errors import InvalidArgument, LedgerUnavailable
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger, schema
from terrine.mechanisms import Release

BUDGET = Budget(epsilon=1.0, delta=0.0)
TENTH = PureDP(epsilon=0.1)


class Spy:
    """A mechanism that must not run when its charge fails."""

    event = TENTH
    ran = 0

    def release(self, value):
        Spy.ran += 1
        return Release(value, TENTH)


@pytest.fixture(autouse=True)
def generous_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_a_new_ledger_is_for_its_owner_alone_at_every_moment(tmp_path, monkeypatch):
    seen, honest = [], schema.migrate

    def watched(connection, *arguments):
        seen.append(modes(tmp_path))
        honest(connection, *arguments)
        seen.append(modes(tmp_path))

    monkeypatch.setattr(schema, "migrate", watched)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.account("main", budget=BUDGET).charge(TENTH)
        seen.append(modes(tmp_path))
        assert {"ledger.db", "ledger.db-wal", "ledger.db-shm"} <= set(seen[-1])
    assert len(seen) == 3
    assert seen[0]
    assert {mode for moment in seen for mode in moment.values()} == {0o600}


def test_a_file_that_its_owner_opened_to_a_group_stays_so(tmp_path):
    path = tmp_path / "ledger.db"
    Ledger.open(path).close()
    path.chmod(0o660)
    with Ledger.open(path) as ledger:
        ledger.account("main", budget=BUDGET).charge(TENTH)
        assert set(modes(tmp_path).values()) == {0o660}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "here" / "ledger.db"
    path.parent.mkdir()
    (tmp_path / "away").mkdir()
    with Ledger.open(path) as ledger:
        ledger.account("main", budget=BUDGET).charge(TENTH)
    return path


def charges(path):
    with Ledger.open(path, create=False) as ledger:
        assert ledger.verify() == []
        return len(list(ledger.account("main").history()))


def refused(account):
    Spy.ran = 0
    with pytest.raises(LedgerUnavailable, match="moved away or replaced") as refusal:
        account.release(Spy(), 1)
    assert Spy.ran == 0
    assert "\n" not in str(refusal.value)


def moved(file):
    """Moved with the files beside it, as `mv ledger.db* away` does."""
    away = file.parent.parent / "away"
    for one in sorted(file.parent.iterdir()):
        one.rename(away / one.name)
    return away / file.name


@pytest.mark.parametrize("idle", [True, False])
def test_a_file_moved_away_is_noticed_and_nothing_is_charged_to_it(file, idle):
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        account.charge(TENTH)
        if not idle:
            ledger.close()  # lets go of its connections; the next charge opens one
        away = moved(file)
        refused(account)
        refused(account)
        assert list(file.parent.iterdir()) == []  # and no empty ledger was begun in its place
    assert charges(away) == 2


def test_a_file_put_back_goes_on(file):
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        account.charge(TENTH)
        away = moved(file)
        refused(account)
        for one in away.parent.iterdir():
            one.rename(file.parent / one.name)
        account.charge(TENTH)
    assert charges(file) == 3


def test_a_removed_file_is_noticed(file):
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        file.unlink()
        refused(account)
        with pytest.raises(LedgerUnavailable, match="moved away or replaced"):
            account.spent()


@pytest.mark.parametrize("idle", [True, False])
def test_another_file_in_its_place_is_noticed_for_good(file, tmp_path, idle):
    old = tmp_path / "old.db"
    shutil.copy(file, old)
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        account.charge(TENTH)
        if not idle:
            ledger.close()
        os.replace(old, file)
        for tail in ("-wal", "-shm"):
            file.with_name(file.name + tail).unlink(missing_ok=True)
        refused(account)
        refused(account)
    assert charges(file) == 1


@pytest.mark.parametrize("tail", ["-wal", "-shm"])
def test_a_log_removed_under_an_open_ledger_is_noticed(file, tail):
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        account.charge(TENTH)
        file.with_name(file.name + tail).unlink()
        refused(account)


def test_a_file_moved_while_a_charge_is_priced_is_noticed_before_it_is_committed(file, monkeypatch):
    from terrine.ledger.balance import Balance

    honest = Balance.accept

    def slow(self, event, partition=""):
        if file.exists():
            moved(file)
        return honest(self, event, partition)

    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        monkeypatch.setattr(Balance, "accept", slow)
        refused(account)
        monkeypatch.undo()
    assert charges(file.parent.parent / "away" / file.name) == 1


def elsewhere(path):
    """Another process charges a tenth, and as the last one to close removes the log, if SQLite lets it."""
    code = "import sys; from terrine.ledger import Ledger; from terrine.events import PureDP\n"
    code += "with Ledger.open(sys.argv[1]) as ledger: ledger.account('main').charge(PureDP(epsilon=0.1))"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


def test_opening_a_ledger_twice_in_one_process_loses_no_charge(file):
    """A file that is opened and closed beside SQLite loses the process's locks, and another process removes the log."""
    with Ledger.open(file) as one:
        account = one.account("main")
        account.charge(TENTH)
        with Ledger.open(file):
            elsewhere(file)
            account.charge(TENTH)
            assert charges(file) == 4
        account.charge(TENTH)
    assert charges(file) == 5


def test_a_program_that_reads_the_file_and_so_drops_its_locks_is_told(file):
    with Ledger.open(file) as ledger:
        account = ledger.account("main")
        account.charge(TENTH)
        file.read_bytes()
        elsewhere(file)
        refused(account)
        account.charge(TENTH)  # by a connection of its own
    assert charges(file) == 4


def test_a_change_of_the_working_folder_does_not_lead_to_another_file(file, monkeypatch, tmp_path):
    monkeypatch.chdir(file.parent)
    with Ledger.open("ledger.db") as ledger:
        account = ledger.account("main")
        ledger.close()
        monkeypatch.chdir(tmp_path)
        account.charge(TENTH)
    assert not (tmp_path / "ledger.db").exists()
    assert charges(file) == 2


def test_a_link_turned_to_another_file_is_noticed(file, tmp_path):
    other, link = tmp_path / "other.db", tmp_path / "link.db"
    shutil.copy(file, other)
    link.symlink_to(file)
    with Ledger.open(link) as ledger:
        account = ledger.account("main")
        account.charge(TENTH)
        link.unlink()
        link.symlink_to(other)
        refused(account)


def test_a_link_to_a_file_that_is_not_there_yet_is_filled(tmp_path):
    link, real = tmp_path / "link.db", tmp_path / "real.db"
    link.symlink_to(real)
    with Ledger.open(link) as ledger:
        ledger.account("main", budget=BUDGET).charge(TENTH)
    assert link.is_symlink()
    assert modes(tmp_path) == {"link.db": 0o600, "real.db": 0o600}
    assert charges(real) == 1


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///file::memory:?uri=true",
        "sqlite:///file:x?mode=memory&cache=shared&uri=true",
        "sqlite:///x.db?mode=memory&uri=true",
        "sqlite:///file:ledger.db?nolock=1&uri=true",
    ],
)
def test_a_url_that_leads_into_memory_or_round_the_locks_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="url"):
        Ledger.open(url)
    assert list(tmp_path.iterdir()) == []
