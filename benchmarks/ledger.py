"""The ledger's claims, at full size: crashes, races, throughput and growth.

    python benchmarks/ledger.py [--json out.json] [--kills 200] [--rounds 1000] [--rows 100000]

Every figure is a count of violations or a ratio measured in one run, so that machines can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import postgres
from terrine.errors import BudgetExceeded
from terrine.events import Budget, Gaussian, PureDP, to_json
from terrine.ledger import Ledger
from terrine.ledger.records import ChargeRow, hashed, write_cost, write_state
from terrine.mechanisms import Release

PROCESSES = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Marked:
    """A mechanism that leaves a mark the moment it touches its value: each mark must have its charge on disk."""

    event: PureDP
    marks: int

    def release(self, tag: str) -> Release[str]:
        os.write(self.marks, f"{tag}\n".encode())
        return Release(tag, self.event)


def crashes(url: str, folder: Path, *, kills: int, workers: int = 4, seed: int = 1) -> dict[str, Any]:
    """Kill `workers` charging processes at random moments, `kills` times; look at what is left each time."""
    random_, charged = random.Random(seed), 0
    lost = unpaid = broken = 0
    with Ledger.open(url) as ledger:
        ledger.account("crashes", budget=Budget(epsilon=1000.0, delta=0.0))
    released, acknowledged = folder / "released", folder / "acknowledged"
    for kill in range(kills):
        open_ = PROCESSES.Semaphore(0)
        crew = [
            PROCESSES.Process(target=_charge_for_ever, args=(url, released, acknowledged, f"{kill}-{worker}", open_))
            for worker in range(workers)
        ]
        for process in crew:
            process.start()
        if random_.random() < 0.9:  # one time in ten, do not even wait until the ledger is open
            for _ in crew:
                open_.acquire(timeout=30)
        time.sleep(random_.uniform(0.0, 0.1))
        for process in crew:
            os.kill(process.pid or 0, signal.SIGKILL)
        for process in crew:
            process.join()
        with Ledger.open(url) as ledger:
            history = [charge.purpose for charge in ledger.account("crashes").history()]
            broken += len(ledger.verify())
        lost += len(_lines(acknowledged) - set(history))
        unpaid += len(_lines(released) - set(history))
        charged = len(history)
    return {
        "kills": kills,
        "charges": charged,
        "acknowledged": len(_lines(acknowledged)),
        "lost": lost,
        "released_without_charge": unpaid,
        "findings": broken,
    }


def crashes_in_turn(fresh: Callable[[int], str], folder: Path, *, kills: int, each: int = 20) -> dict[str, Any]:
    """The same on a fresh ledger for every `each` kills, so that checking all of it each time stays quick."""
    total: dict[str, Any] = {}
    for turn, start in enumerate(range(0, kills, each)):
        place = folder / str(turn)
        place.mkdir(parents=True)
        found = crashes(fresh(turn), place, kills=min(each, kills - start), seed=turn)
        total = {name: total.get(name, 0) + value for name, value in found.items()}
    return total


def _charge_for_ever(url: str, released: Path, acknowledged: Path, name: str, open_: Any) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    marks, done = os.open(released, flags), os.open(acknowledged, flags)
    account = Ledger.open(url).account("crashes")
    open_.release()
    mechanism = Marked(PureDP(epsilon=1e-6), marks)
    for number in range(10**9):
        tag = account.release(mechanism, f"{name}-{number}", purpose=f"{name}-{number}").value
        os.write(done, f"{tag}\n".encode())


def _lines(path: Path) -> set[str]:
    # The last line may have been cut by the kill; a whole one ends in a newline.
    text = path.read_text() if path.exists() else ""
    return set(text[: text.rfind("\n") + 1].split())


def race(url: str, *, rounds: int, processes: int = 16) -> dict[str, Any]:
    """`processes` charge the last tenth of a budget at one moment, `rounds` times: exactly one may win each time."""
    Ledger.open(url).close()
    gate, wins = PROCESSES.Barrier(processes + 1), PROCESSES.Value("i", 0)
    crew = [PROCESSES.Process(target=_race_on, args=(url, rounds, gate, wins)) for _ in range(processes)]
    for process in crew:
        process.start()
    overspent = unclaimed = 0
    with Ledger.open(url) as ledger:
        for number in range(rounds):
            account = ledger.account(f"race-{number}", budget=Budget(epsilon=1.0, delta=0.0))
            account.charge(PureDP(epsilon=0.9))
            wins.value = 0
            gate.wait(60)  # the account is open
            gate.wait(60)  # everyone holds it
            gate.wait(120)  # everyone has tried
            overspent += wins.value > 1 or account.spent(0.0) > 1.0
            unclaimed += wins.value < 1
        findings = len(ledger.verify())
    for process in crew:
        process.join()
    return {
        "rounds": rounds,
        "processes": processes,
        "overspent": overspent,
        "unclaimed": unclaimed,
        "findings": findings,
    }


def _race_on(url: str, rounds: int, gate: Any, wins: Any) -> None:
    ledger = Ledger.open(url, timeout=60)
    for number in range(rounds):
        gate.wait(60)
        account = ledger.account(f"race-{number}")
        gate.wait(60)
        with contextlib.suppress(BudgetExceeded):
            account.charge(PureDP(epsilon=0.1))
            with wins.get_lock():
                wins.value += 1
        gate.wait(120)


def throughput(url: str, insert: Callable[[], None], *, batches: int, size: int) -> dict[str, Any]:
    """Charges per second against bare inserts of one row of the same size, in turns; the median of the ratios."""
    with Ledger.open(url) as ledger:
        account = ledger.account("throughput", budget=Budget(epsilon=8.0, delta=1e-6))
        event = Gaussian(noise=10_000.0)
        account.charge(event)
        # Until a log has its full size, its growth is written too; both start from logs that only turn over.
        _seconds(lambda: account.charge(event), 400)
        _seconds(insert, 1100)
        charges, inserts = [], []
        for _ in range(batches):
            charges.append(_seconds(lambda: account.charge(event, purpose="count", by="analyst"), size))
            inserts.append(_seconds(insert, size))
    return {
        "charges_per_second": 1 / statistics.median(charges),
        "inserts_per_second": 1 / statistics.median(inserts),
        "ratio": statistics.median(bare / charge for charge, bare in zip(charges, inserts, strict=True)),
    }


def bare_sqlite(path: Path) -> Callable[[], None]:
    """One row, one transaction, the ledger's journal and durability."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE bare (number INTEGER PRIMARY KEY, content TEXT NOT NULL)")

    def insert() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO bare (content) VALUES (?)", ("x" * 1000,))
        connection.execute("COMMIT")

    return insert


def bare_postgresql(url: str) -> Callable[[], None]:
    """One row, one transaction, synchronous_commit on."""
    import psycopg

    connection = psycopg.connect(url.replace("+psycopg", ""))
    connection.execute("SET synchronous_commit = on")
    connection.execute("CREATE TABLE bare (number BIGSERIAL PRIMARY KEY, content TEXT NOT NULL)")
    connection.commit()

    def insert() -> None:
        connection.execute("INSERT INTO bare (content) VALUES (%s)", ("x" * 1000,))
        connection.commit()

    return insert


def growth(url: str, *, rows: int, tries: int = 30) -> dict[str, Any]:
    """The CPU and wall time of a charge on an empty account and on one with `rows` charges, each by a fresh handle."""
    event = PureDP(epsilon=1e-6)
    with Ledger.open(url) as ledger:
        ledger.account("new", budget=Budget(epsilon=1000.0, delta=1e-6))
        ledger.account("old", budget=Budget(epsilon=1000.0, delta=1e-6))
        _fill(ledger, "old", event, rows)
        times: dict[str, list[float]] = {"new": [], "old": []}
        for _ in range(tries):
            for name, seconds in times.items():
                account = ledger.account(name)
                seconds.append(_seconds(lambda account=account: account.charge(event), 1))  # type: ignore[misc]
        charges = next(reversed(list(ledger.account("old").history()))).sequence
    new, old = (statistics.median(times[name]) for name in ("new", "old"))
    return {"rows": charges, "first_ms": 1000 * new, "last_ms": 1000 * old, "ratio": old / new}


def _fill(ledger: Ledger, name: str, event: PureDP, rows: int) -> None:
    """The rows that `rows` charges would write, in one transaction instead of one each."""
    account, store = ledger.account(name), ledger._store
    with store.transaction() as session:
        head = store.lock_head(session, account._row.account)
        at, balance = account._standing(session, head)
        for sequence in range(head[0] + 1, rows + 1):
            accepted = balance.accept(event)
            assert accepted is not None
            cost, balance = accepted
            row = ChargeRow(
                account=account._row.account,
                sequence=sequence,
                at=at,
                event=to_json(event),
                purpose="",
                by="",
                partition="",
                cost=write_cost(cost),
                state=write_state(*balance.state("")),
                sealed="",
                previous=head[1],
            )
            row = hashed(row)
            store.append(session, row)
            head = (row.sequence, row.hash)


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def main() -> None:
    """Run everything, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=41)
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    wanted = parser.parse_args()
    results: dict[str, Any] = {}

    def note(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        shown = "  ".join(f"{key} {value:.4g}" for key, value in result.items())
        print(f"{name:24} {shown}", flush=True)
        if wanted.json:
            wanted.json.write_text(json.dumps(results, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if wanted.only != "postgresql":
            bare = bare_sqlite(folder / "bare.db")
            note("throughput sqlite", throughput(f"sqlite:///{folder}/t.db", bare, batches=wanted.batches, size=25))
            note("growth sqlite", growth(f"sqlite:///{folder}/g.db", rows=wanted.rows))
            note(
                "crashes sqlite",
                crashes_in_turn(lambda turn: f"sqlite:///{folder}/c{turn}.db", folder / "c", kills=wanted.kills),
            )
            note("race sqlite", race(f"sqlite:///{folder}/r.db", rounds=wanted.rounds))
        if wanted.only == "sqlite":
            return
        if reason := postgres.reason_to_skip():
            print(f"PostgreSQL skipped: {reason}")
            return
        with postgres.server() as url:
            note("throughput postgresql", throughput(url, bare_postgresql(url), batches=wanted.batches, size=25))
            note(
                "crashes postgresql",
                crashes_in_turn(lambda turn: postgres.schema(url, f"c{turn}"), folder / "pg", kills=wanted.kills),
            )
            note("race postgresql", race(url, rounds=wanted.rounds))


if __name__ == "__main__":
    main()
