"""The gateway's claims under load and faults: on loopback, bounded in count and in time.

    python benchmarks/gateway.py load   [--analysts 50] [--seconds 60] [--only sqlite|postgresql] [--servers 2]
    python benchmarks/gateway.py kills  [--kills 50]                   [--only sqlite|postgresql]

`load`: analysts ask in parallel from one budget that runs out on the way. Never overspent, no answer without its
charge, latencies stated. `kills`: the server is killed with signal 9 at random moments while analysts ask and a
training runs. Every answer that a client holds is in the ledger, what was charged and not shown says so, the training
comes to its end by one charge, logins survive.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
import postgres
from terrine.client import Gateway, GatewayRefused
from terrine.events import from_json
from terrine.gateway.configuration import read
from terrine.ledger import Ledger

SQL = "SELECT region, COUNT(*) AS n FROM visits GROUP BY region"
KEYS = {"region": ["N", "S"]}
TRAINING = {"label": "urgent", "epsilon": 1.0, "delta": 1e-4, "epochs": 60.0, "lot": 8, "audit": 0}
ROOM = 1e-9
_MANY = {"per_minute": 10**9, "failures_per_minute": 10**9}
_CONTEXT = multiprocessing.get_context("forkserver")


class Server:
    """One server in a process of its own."""

    def __init__(self, told: dict[str, Any], port: int | None = None) -> None:
        self.told, self.port = told, port or _free_port()
        self.process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        self.process = _CONTEXT.Process(target=_serve, args=(self.told, self.port), daemon=True)
        self.process.start()
        ends = time.monotonic() + 600
        while time.monotonic() < ends:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            if not self.process.is_alive():
                raise RuntimeError(f"the server ended with {self.process.exitcode}")
            time.sleep(0.02)
        raise RuntimeError("the server does not answer")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(timeout=20)
        if self.process.is_alive():
            self.kill()


def _serve(told: dict[str, Any], port: int) -> None:
    from terrine.gateway import serve

    serve(read(told), port=port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepared(folder: Path, ledger: str, *, budget: float, training: bool = False) -> tuple[dict[str, Any], str]:
    """A gateway's configuration over made-up visits, and its owner's token."""
    from terrine import tables
    from terrine.gateway.services import Services

    data = folder / "data"
    data.mkdir(parents=True)
    generator = np.random.default_rng(0)
    columns = {"patient_id": generator.integers(0, 1_000, 4_000), "region": generator.choice(["N", "S"], 4_000)}
    pq.write_table(pa.table(columns), data / "visits.parquet")
    told: dict[str, Any] = {
        "folder": str(folder),
        "ledger": ledger,
        "limits": _MANY,
        "datasets": {
            "visits": {
                "source": "visits.parquet",
                "tables": {"visits": {"person": "patient_id", "rows": 5}},
                "budget": {"epsilon": budget, "delta": 1e-3},
            }
        },
    }
    if training:
        lines = ["patient_id,age,urgent"]
        lines += [f"{person},{age},{'yes' if age > 50 else 'no'}" for person, age in enumerate(range(1, 100))]
        (data / "patients.csv").write_text("\n".join(lines) + "\n")
        facts = {"patient_id": tables.Ignored(), "age": tables.Number(0.0, 100.0)}
        (data / "patients.schema.toml").write_text(tables.Schema("urgent", ("no", "yes"), facts).to_toml())
        lent = {"table": "patients.csv", "person": "patient_id", "labels": ["urgent"]}
        told["datasets"]["visits"]["training"] = lent
    services = Services(read(told), create=True)
    token = services.first_token()
    services.stop()
    return told, token


def lend(url: str, owner: str, member: str, allowance: float) -> str:
    """A new analyst's token."""
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {owner}"}, timeout=60) as client:
        body = {"role": "analyst", "allowance": allowance}
        client.put(f"/datasets/visits/members/{member}", json=body).raise_for_status()
        made = client.post("/tokens", json={"member": member, "dataset": "visits"})
        made.raise_for_status()
        return str(made.json()["secret"])


def load(folder: Path, ledger: str, *, analysts: int, seconds: float, servers: int) -> dict[str, float]:
    """Analysts in parallel from one budget, which is to run out in about half of the time."""
    epsilon = 0.01
    told, owner = prepared(folder, ledger, budget=epsilon * max(5.0, 6.0 * seconds))
    running = [Server(told).start() for _ in range(servers)]
    try:
        names = [f"analyst-{number}" for number in range(analysts)]
        tokens = [lend(running[0].url, owner, name, 1e6) for name in names]
        held: list[tuple[str, float]] = []
        refused: list[float] = []
        other: collections.Counter[str] = collections.Counter()
        ends, turn = time.monotonic() + seconds, threading.Lock()

        def ask(number: int) -> None:
            with Gateway(running[number % servers].url, tokens[number], timeout=120) as gateway:
                while time.monotonic() < ends:
                    begun = time.perf_counter()
                    try:
                        answer = gateway.ask(SQL, epsilon=epsilon, dataset="visits", keys=KEYS, fresh=True)
                    except GatewayRefused as error:
                        took = time.perf_counter() - begun
                        with turn:
                            if error.status == 409:
                                refused.append(took)
                            else:
                                other[f"{error.status}"] += 1
                        continue
                    with turn:
                        held.append((answer.charge, time.perf_counter() - begun))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(analysts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for one in running:
            one.stop()
    found = {"answers": len(held), "refused": len(refused), "other": sum(other.values())}
    found |= {"per s": len(held) / seconds}
    for name, times in (("answer", [took for _, took in held]), ("refusal", refused)):
        if times:
            found |= {f"{name} p50 s": float(np.quantile(times, 0.5)), f"{name} p99 s": float(np.quantile(times, 0.99))}
    return found | checked(told, [charge for charge, _ in held])


def checked(told: dict[str, Any], held: list[str]) -> dict[str, float]:
    """What must hold of the database afterwards, whatever happened.

    Raises:
        AssertionError: it does not.
    """
    from terrine.gateway import schema
    from terrine.gateway.database import Database

    where = read(told).database
    with Ledger.open(where, create=False) as book:
        assert not (findings := book.verify()), findings[0]
        account = book.account("visits")
        charges = {one.hash: one for one in account.history()}
        spent, budget = account.spent(), account.budget.epsilon
    assert spent <= budget * (1 + ROOM), (spent, budget)
    assert len(set(held)) == len(held), "two answers by one charge"
    assert not set(held) - set(charges), "an answer without its charge"
    database = Database(where)
    with database.read() as session:
        rows = [row._mapping for row in session.execute(schema.REQUESTS.select())]
        members = [row._mapping for row in session.execute(schema.MEMBERS.select())]
    database.close()
    by_charge = {row["charge"]: row for row in rows if row["charge"]}
    for one in charges.values():
        row = by_charge.get(one.hash)
        assert row is not None, f"charge {one.sequence} belongs to no request"
        assert row["state"] in ("answered", "failed", "charged", "cancelled"), row["state"]
        if row["state"] == "answered" and row["kind"] == "query":
            record = json.loads(row["answer"])
            assert from_json(json.dumps(record["proof"]["event"])) == one.event
            assert record["proof"]["head"] == one.hash
    assert all(row["charge"] in charges for row in rows if row["state"] in ("answered", "failed"))
    for member in members:
        mine = [row for row in rows if row["member"] == member["member"] and row["counted"]]
        counted = sum(row["price"] for row in mine if row["state"] not in ("refused", "waiting", "denied"))
        assert counted == member["spent"], (member["member"], counted, member["spent"])
    states = collections.Counter(row["state"] for row in rows)
    return {"charges": len(charges), "spent": spent, "budget": budget, "lost after the charge": states["failed"]}


def kills(folder: Path, ledger: str, *, kills: int, analysts: int = 4, training: bool = True) -> dict[str, float]:
    """Signal 9 at random moments, while analysts ask and a training runs."""
    told, owner = prepared(folder, ledger, budget=1_000.0, training=training)
    server = Server(told).start()
    tokens = [lend(server.url, owner, f"analyst-{number}", 1e6) for number in range(analysts)]
    browser = httpx.Client(base_url=server.url, timeout=60)
    assert browser.post("/login", data={"token": tokens[0]}).status_code == 303
    held: list[str] = []
    strange: list[str] = []
    over, turn = threading.Event(), threading.Lock()
    job = ""
    if training:
        with Gateway(server.url, tokens[0]) as gateway:
            job = gateway.train(**TRAINING).request

    def ask(number: int) -> None:
        with Gateway(server.url, tokens[number], timeout=60) as gateway:
            while not over.is_set():
                try:
                    answer = gateway.ask(SQL, epsilon=0.001, dataset="visits", keys=KEYS, fresh=True)
                except GatewayRefused as error:
                    if error.status not in (0, 500, 503):
                        strange.append(f"{error.status}: {error}")
                    time.sleep(0.02)
                    continue
                with turn:
                    held.append(answer.charge)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(analysts)]
    for thread in threads:
        thread.start()
    chance = random.Random(1)
    workers = 0
    for _ in range(kills):
        time.sleep(chance.uniform(0.02, 3.0))
        server.kill()
        if training and chance.random() < 0.2:
            workers += _kill_worker(folder / "jobs" / f"{job}.lock")
        server.start()
        assert browser.get("/me").status_code == 200, "the login did not survive"
    over.set()
    for thread in threads:
        thread.join()
    assert not strange, strange[:3]
    if training:
        with Gateway(server.url, tokens[0]) as gateway:
            ended = gateway.wait(job, seconds=300)
            if ended.state == "failed":  # its workers were killed as often as a server tries; the analyst goes on
                assert "ended 5 times" in ended.said, ended.said
                gateway.resume(job)
                ended = gateway.wait(job, seconds=300)
        assert ended.state == "answered", ended.said
    time.sleep(2.5)  # the keeper's round
    server.stop()
    found = checked(told, held)
    with contextlib.closing(_database(told)) as database, database.read() as session:
        rows = [row._mapping for row in session.execute(_requests().select())]
    assert not [row for row in rows if row["state"] == "reserved"], "left unfinished"
    if training:
        assert sum(1 for row in rows if row["request"] == job and row["charge"]) == 1
    return {"kills": kills, "killed workers": workers, "answers held": len(held)} | found


def _database(told: dict[str, Any]) -> Any:
    from terrine.gateway.database import Database

    return Database(read(told).database)


def _requests() -> Any:
    from terrine.gateway import schema

    return schema.REQUESTS


def _kill_worker(lock: Path) -> int:
    """Kill whoever holds a training's lock: a process that our own server started."""
    with contextlib.suppress(OSError, ValueError):
        process = int(lock.read_text())
        if b"terrine.gateway.worker" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)
            return 1
    return 0


@contextlib.contextmanager
def stores(only: str | None) -> Iterator[list[tuple[str, str]]]:
    """A URL of every kind of store that can be had here."""
    found = [("sqlite", "ledger.db")] if only != "postgresql" else []
    if only == "sqlite" or (reason := postgres.reason_to_skip()):
        if only != "sqlite":
            print(f"PostgreSQL skipped: {reason}")
        yield found
        return
    with postgres.server() as url:
        yield [*found, ("postgresql", url)]


def main() -> None:
    """Run what is asked for, print a line for each store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "kills"])
    parser.add_argument("--analysts", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    wanted = parser.parse_args()
    _CONTEXT.set_forkserver_preload(["terrine.gateway.server", "duckdb"])
    with tempfile.TemporaryDirectory() as temporary, stores(wanted.only) as found:
        for name, ledger in found:
            folder = Path(temporary) / name
            if wanted.what == "load":
                told = {"analysts": wanted.analysts, "seconds": wanted.seconds, "servers": wanted.servers}
                result = load(folder, ledger, **told)
            else:
                result = kills(folder, ledger, kills=wanted.kills)
            shown = "  ".join(f"{key} {value:.4g}" for key, value in result.items())
            print(f"{wanted.what} {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
