"""A gateway over a made-up clinic, for the tests: in process, with one client for each role."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from starlette.testclient import TestClient

from terrine.gateway import create_app
from terrine.gateway.configuration import read

COUNT = {
    "sql": "SELECT region, COUNT(*) AS n FROM visits GROUP BY region",
    "epsilon": 0.1,
    "keys": {"region": ["N", "S"]},
}
VISITS = {
    "source": "visits.parquet",
    "tables": {"visits": {"person": "patient_id", "rows": 5}},
    "budget": {"epsilon": 2.0, "delta": 1e-6},
    "about": "Visits to the clinic",
}


def write_visits(folder: Path, name: str = "visits", people: int = 200) -> None:
    """A table of visits in the gateway's data folder."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    rows = 4 * people
    table = {
        "patient_id": generator.integers(0, people, rows),
        "region": generator.choice(["N", "S"], rows),
        "cost": generator.gamma(2, 100, rows),
    }
    pq.write_table(pa.table(table), folder / f"{name}.parquet")


@dataclass
class Clinic:
    """An open gateway, and clients with tokens."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    clock: Any = None

    def __post_init__(self) -> None:
        write_visits(self.folder / "data")
        told = {"ledger": "ledger.db", "folder": self.folder, "hosts": ["testserver"], **self.options}
        self.configuration = read(told)
        more = {} if self.clock is None else {"clock": self.clock}
        self.app = create_app(self.configuration, create=True, **more)
        self.gateway = self.app.state.gateway
        self.plain = TestClient(self.app, raise_server_exceptions=False, follow_redirects=False)
        self.plain.__enter__()
        self.tokens = {"owner": self.gateway.first_token()}
        self.owner = self.client("owner")

    def close(self) -> None:
        self.plain.__exit__(None, None, None)

    def client(self, name: str) -> TestClient:
        """A client that sends a token."""
        headers = {"authorization": f"Bearer {self.tokens[name]}"}
        return TestClient(self.app, headers=headers, raise_server_exceptions=False, follow_redirects=False)

    def lend(self, member: str, role: str = "analyst", dataset: str = "visits", allowance: float = 1.0) -> TestClient:
        """Somebody new with a token."""
        body = {"role": role, "allowance": allowance if role == "analyst" else 0}
        done(self.owner.put(f"/datasets/{dataset}/members/{member}", json=body))
        made = done(self.owner.post("/tokens", json={"member": member, "dataset": dataset}))
        self.tokens[member] = made["secret"]
        return self.client(member)

    def spent(self, dataset: str = "visits") -> int:
        """How many charges there are."""
        return sum(1 for _ in self.gateway.database.ledger.account(dataset).history())


def done(response: Any) -> Any:
    """The body of an answer that is a success."""
    assert response.status_code < 300, (response.status_code, response.text)
    return response.json()


def opened(folder: Path, **options: Any) -> Clinic:
    """A clinic with its visits registered."""
    clinic = Clinic(folder, options)
    done(clinic.owner.post("/datasets/visits", json=VISITS))
    return clinic
