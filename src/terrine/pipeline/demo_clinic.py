"""The demonstration's second half: a query and a training charged to one ledger, and a forged claim that is found.

The clinic is made up: visits of patients, several each. What is protected is a patient, whatever is asked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from terrine.errors import BudgetExceeded
from terrine.events import Budget, Unit
from terrine.ledger import Ledger
from terrine.pipeline import pages
from terrine.pipeline.folder import PRIVACY, Folder
from terrine.pipeline.job import train
from terrine.pipeline.settings import Settings
from terrine.queries import Private, Session
from terrine.verify import manifest, verify

BUDGET = Budget(epsilon=3.0, delta=1e-6)
_QUERY, _TRAINING = 0.5, 2.0
_PATIENTS = 2000
_SQL = "SELECT ward, COUNT(*) AS visits, AVG(cost) AS cost FROM visits GROUP BY ward"
_SCHEMA = """
[label]
name = "readmitted"
classes = ["no", "yes"]
[columns.patient]
kind = "ignored"
[columns.age]
kind = "number"
low = 18
high = 100
[columns.ward]
kind = "category"
values = ["north", "south"]
[columns.cost]
kind = "number"
low = 0
high = 2000
"""


@dataclass(frozen=True)
class Entry:
    """One charge: who asked for what, and what it cost."""

    purpose: str
    by: str
    epsilon: float
    left: float
    """The share of the budget that is left afterwards, whatever is asked next."""


@dataclass(frozen=True)
class Clinic:
    """What happened to the clinic's budget."""

    sql: str
    rows: tuple[dict[str, Any], ...]
    accuracy: float
    entries: tuple[Entry, ...]
    refused: str
    """What the ledger said to the training that would have gone too far."""
    folder: Folder


@dataclass(frozen=True)
class Forgery:
    """A claim that somebody made smaller by hand, and what `verify` says of it."""

    claimed: float
    forged: float
    check: str
    detail: str


def clinic(out: Path, *, progress: Callable[[str], Any], quiet: bool) -> Clinic:
    """A query, a training and a refusal: one table, one ledger, one budget for every patient."""
    shutil.rmtree(out / "clinic", ignore_errors=True)
    folder = out / "clinic"
    folder.mkdir(parents=True)
    table = _table(folder / "visits.csv", _PATIENTS, seed=1)
    tested = _table(folder / "others.csv", 500, seed=2)
    entries: list[Entry] = []
    with Ledger.open(f"sqlite:///{folder / 'budget.db'}") as book:
        account = book.account("patients", budget=BUDGET, unit=Unit.PERSON)
        session = Session(
            str(table), account, {"visits": Private(person="patient", rows=10)}, purpose="visits by ward", by="analyst"
        )
        answer = session.sql(_SQL, epsilon=_QUERY, bounds={"cost": (0.0, 2000.0)}, keys={"ward": ["north", "south"]})
        entries.append(_entry(account, "query: visits by ward", "analyst", answer.epsilon))
        asked = Settings(
            epsilon=_TRAINING,
            delta=BUDGET.delta / 10,
            table=str(table),
            label="readmitted",
            person="patient",
            test=str(tested),
            audit=0,
            epochs=5,
        )
        run = train(
            asked, folder / "run", account=account, purpose="readmission model", by="data scientist",
            progress=progress, quiet=quiet,
        )  # fmt: skip
        pages.write(run)
        claim = run.read(PRIVACY)
        entries.append(_entry(account, "training: readmission model", "data scientist", claim["epsilon"]))
        try:
            train(asked, folder / "another", account=account, purpose="another model", by="data scientist")
        except BudgetExceeded as error:
            refused = str(error)
    return Clinic(_SQL, tuple(answer.table.to_pylist()), _accuracy(run), tuple(entries), refused, run)


def forgery(folder: Folder, to: Path) -> Forgery:
    """A copy of a release whose claim is a tenth of what was spent, with a manifest made anew to fit."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder.path, to, ignore=shutil.ignore_patterns("owner", "audit", "report.html"))
    claim = json.loads((to / PRIVACY).read_text(encoding="utf-8"))
    honest, claim["epsilon"] = claim["epsilon"], claim["epsilon"] / 10
    (to / PRIVACY).write_text(json.dumps(claim), encoding="utf-8")
    manifest.write(to)
    lie = verify(to).lie
    assert lie is not None
    return Forgery(honest, claim["epsilon"], lie.name, lie.detail)


def _table(path: Path, patients: int, seed: int) -> Path:
    """Visits of made-up patients, one to five each; those who are old and expensive come back more often."""
    generator = np.random.default_rng(seed)
    whose = np.repeat(np.arange(patients), generator.integers(1, 6, patients))
    age = generator.integers(18, 100, patients)[whose]
    ward = generator.choice(["north", "south"], len(whose))
    cost = np.minimum(generator.gamma(2.0, 150 + 3 * age), 2000).round(2)
    back = generator.random(len(whose)) < 1 / (1 + np.exp(-(0.09 * (age - 62) + 0.002 * (cost - 600))))
    lines = [
        f"p{one},{age[row]},{ward[row]},{cost[row]},{'yes' if back[row] else 'no'}" for row, one in enumerate(whose)
    ]
    path.write_text("patient,age,ward,cost,readmitted\n" + "\n".join(lines) + "\n", encoding="utf-8")
    path.with_suffix(".schema.toml").write_text(_SCHEMA, encoding="utf-8")
    return path


def _entry(account: Any, purpose: str, by: str, epsilon: float) -> Entry:
    return Entry(purpose, by, epsilon, 1.0 - account.used())


def _accuracy(run: Folder) -> float:
    return float(run.read("results.json")["accuracy"])
