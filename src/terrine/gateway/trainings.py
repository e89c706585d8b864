"""Trainings as jobs: priced here, run by `worker` in a process of their own, looked after until they end.

A training is a request of kind `training`; its folder lies in the jobs folder, under the request's name. Whoever holds
the lock beside it runs it; a server that finds one without a holder starts it again, and it goes on from its
checkpoint by the receipt in its folder. What an analyst may set is `TrainBody`, and no more: no path, no code.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from terrine import files
from terrine.errors import BudgetExceeded, InvalidArgument, TerrineError
from terrine.events import to_json
from terrine.gateway import members, requests, schema
from terrine.gateway.asking import wait, waiting
from terrine.gateway.bodies import DatasetBody, TrainBody
from terrine.gateway.configuration import Configuration
from terrine.gateway.database import Database, Session
from terrine.gateway.datasets import Datasets, OpenDataset
from terrine.gateway.refusals import Refused, log
from terrine.gateway.tokens import Caller

MOST_ATTEMPTS = 5
_COUNTED = ("reserved", "charged")
_ENDED = ("cancelled", "failed")


class Trainings:
    """The trainings of one gateway."""

    def __init__(self, configuration: Configuration, database: Database, datasets: Datasets) -> None:
        self._configuration, self._database, self._datasets = configuration, database, datasets
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def folder(self) -> Path:
        """Where the jobs lie."""
        return self._configuration.path(self._configuration.jobs)

    @property
    def home(self) -> str:
        """The name of this jobs folder: a server looks after the trainings of its own, whichever process it is."""
        path = files.private_folder(self.folder) / "home"
        if not path.exists():
            draft = path.with_name(f".{secrets.token_hex(8)}")
            draft.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path.read_text()

    def price(self, caller: Caller, name: str, body: TrainBody) -> dict[str, Any]:
        """What a training would cost: from the number of people, the schema and the settings alone."""
        opened = self._datasets.open(name)
        plan = self._planned(opened, body)
        with self._database.read() as session:
            member = members.find(session, name, caller.member)
        return {
            "dataset": name,
            "epsilon": plan.epsilon,
            "delta": plan.budget.delta,
            "event": json.loads(to_json(plan.event)),
            "fits_budget": opened.purse.account().would_cost(plan.event).fits,
            **members.quoted(member, plan.epsilon, plan.budget.delta),
        }

    def submit(self, caller: Caller, name: str, body: TrainBody) -> dict[str, Any]:
        """Take a training in: within the allowance it is queued, beyond it waits for approval."""
        opened = self._datasets.open(name)
        plan = self._planned(opened, body)
        if not opened.purse.account().would_cost(plan.event).fits:
            raise BudgetExceeded("the training does not fit into what is left; nothing was charged")
        row = requests.new(
            self._database,
            dataset=name,
            member=caller.member,
            kind=requests.TRAINING,
            asked=body.model_dump(mode="json", exclude_none=True),
            question="",
            epsilon=plan.epsilon,
            delta=plan.budget.delta,
        )
        with self._database.write() as session:
            held, member = members.reserve(session, row), members.find(session, name, caller.member)
            if held:
                self._must_be_few(session, row)
                requests.add(session, row | self._queued() | {"counted": 1})
        if held:
            return waiting(row) | {"state": "reserved", "said": f"queued; see /requests/{row['request']}"}
        if not body.reason:
            raise members.beyond(member, plan.epsilon, plan.budget.delta)
        wait(self._database, row, self._configuration.limits.waiting_per_analyst)
        return waiting(row)

    def approve(self, row: dict[str, Any], *, by: str, reason: str) -> None:
        """Queue a training that waits, beyond its analyst's allowance."""
        told = {"decided_by": by, "decision": reason, **self._queued()}
        state = str(told.pop("state"))
        with self._database.write() as session:
            member = members.find(session, row["dataset"], row["member"], lock=True)
            if member is None or member["revoked"] or member["role"] != "analyst":
                raise Refused(409, "the analyst has lost the data set since; nothing was charged")
            if not requests.move(session, self._database, row["request"], ("waiting",), state, **told):
                raise Refused(409, "the request waits no more")

    def cancel(self, session: Session, row: dict[str, Any]) -> None:
        """End a training that is queued or running; its worker sees that and stops."""
        end(session, self._database, row, "cancelled", "cancelled")

    def resume(self, row: dict[str, Any]) -> None:
        """Go on with a training that was charged and then cancelled, or failed: by the same receipt, at no new cost."""
        if row["kind"] != requests.TRAINING or row["state"] not in _ENDED or not row["charge"]:
            raise Refused(409, "only a training that was charged and then ended can go on", state=row["state"])
        told: dict[str, Any] = {"progress": "queued", "said": "", "attempts": 0}
        with self._database.write() as session:
            members.find(session, row["dataset"], row["member"], lock=True)
            self._must_be_few(session, row)
            if not requests.move(session, self._database, row["request"], _ENDED, "charged", **told):
                raise Refused(409, "the training has been resumed already")

    def result(self, row: dict[str, Any]) -> Path:
        """The archive of what may be handed on of a finished training."""
        path = self.folder / f"{row['request']}.zip"
        if row["kind"] != requests.TRAINING or row["state"] != "answered":
            raise Refused(409, f"the request is {row['state']}: there is nothing to hand on", state=row["state"])
        if not path.is_file():
            raise Refused(503, "the training's folder lies with another server; ask that one")
        return path

    def look_after(self) -> None:
        """Start what is queued, or was left by a process that is gone, within the limit."""
        for request, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[request]
        wanted = select(schema.REQUESTS).where(
            schema.REQUESTS.c.kind == requests.TRAINING, schema.REQUESTS.c.state.in_(requests.OPEN)
        )
        with self._database.read() as session:
            open_ones = [dict(row._mapping) for row in session.execute(wanted.order_by(schema.REQUESTS.c.made))]
        if not open_ones:
            return
        mine = [row for row in open_ones if row["server"] == self.home]
        held = {row["request"] for row in mine if row["request"] in self._running or _is_held(self.lock(row))}
        for row in mine:
            if row["request"] not in held and len(held) < self._configuration.limits.trainings:
                self._start(row)
                held.add(row["request"])

    def lock(self, row: dict[str, Any]) -> Path:
        """The file that whoever runs a training holds."""
        return self.folder / f"{row['request']}.lock"

    def _start(self, row: dict[str, Any]) -> None:
        with self._database.write() as session:
            if row["attempts"] >= MOST_ATTEMPTS:
                end(session, self._database, row, "failed", f"ended {MOST_ATTEMPTS} times before it was done")
                return
            mine = schema.REQUESTS.c.request == row["request"]
            session.execute(update(schema.REQUESTS).where(mine).values(attempts=row["attempts"] + 1))
        told = {"configuration": _handed(self._configuration), "request": row["request"]}
        path = self.folder / f"{row['request']}.log"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as noise:
            process = subprocess.Popen(
                [sys.executable, "-m", "terrine.gateway.worker"],
                stdin=subprocess.PIPE,
                stdout=noise,
                stderr=noise,
                start_new_session=True,  # what ends the server does not end the training
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(told).encode())
            process.stdin.close()
        self._running[row["request"]] = process

    def _planned(self, opened: OpenDataset, body: TrainBody) -> Any:
        """The run that the settings ask for; what may be wrong with the table's rows is not said."""
        from terrine.pipeline import planning
        from terrine.pipeline.material import open_data

        opened.must_hold(body.delta)
        settings = settings_of(body, opened.body, self._configuration.path(self._configuration.data))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = open_data(settings)
        except (TerrineError, OSError, ValueError) as error:
            log.error("data set %s: %s", opened.name, error)
            raise Refused(
                503, "the table for trainings cannot be opened now; nothing was charged; tell its owner"
            ) from None
        return planning.plan(settings, data)

    def _queued(self) -> dict[str, Any]:
        return {"state": "reserved", "server": self.home, "progress": "queued"}

    def _must_be_few(self, session: Session, row: dict[str, Any]) -> None:
        most = self._configuration.limits.trainings_per_analyst
        told = {"member": row["member"], "dataset": row["dataset"], "kind": requests.TRAINING}
        if requests.counted(session, states=_COUNTED, **told) >= most:
            raise Refused(429, f"{most} of your trainings are queued or running: wait for one to end, or cancel it")


def settings_of(body: TrainBody, declared: DatasetBody, folder: Path | None = None) -> Any:
    """The pipeline's settings: the analyst's choices on the owner's table; names are relative to the data folder.

    Raises:
        InvalidArgument: the data set lends no trainings, or not on this label.
    """
    from terrine.pipeline.settings import Settings

    training = declared.training
    if training is None:
        raise InvalidArgument("the data set is not lent for trainings")
    if body.label not in training.labels:
        raise InvalidArgument(f"label: want one of {', '.join(training.labels)}")
    rows = training.rows_per_person if body.rows_per_person is None else body.rows_per_person
    if rows > training.rows_per_person:
        raise InvalidArgument(f"rows_per_person: want at most {training.rows_per_person}, as the data set is lent")
    at = Path() if folder is None else folder
    test = None if training.test is None else str(at / training.test)
    return Settings(
        table=str(at / training.table),
        person=training.person,
        rows_per_person=rows,
        test=test,
        delta_at_most=declared.budget.delta / 100
        or None,  # where none is asked for: as private keys of a question have
        **body.settings(),
    )


def end(session: Session, database: Database, row: dict[str, Any], state: str, said: str) -> None:
    """End a training by what the ledger says: if it was charged it stays charged; otherwise its price is given back."""
    row = requests.find(session, row["request"], lock=True)
    if row["state"] not in requests.OPEN:
        return
    charge = requests.charge_of(session, row)
    if charge is not None:
        told = {"charge": charge["hash"], "said": f"{said}; it was charged, and stays charged; it can be resumed"}
        requests.move(session, database, row["request"], requests.OPEN, state, **told)
        return
    if row["counted"]:
        members.release(session, row)
    ended = "refused" if state == "failed" else state
    told = {"said": f"{said}; nothing was charged", "counted": 0}
    requests.move(session, database, row["request"], requests.OPEN, ended, **told)


@contextlib.contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Hold a training's lock, if nobody else does; the kernel lets go of it with the process. The file names it."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield True


def _is_held(path: Path) -> bool:
    if not path.exists():
        return False
    with holding(path) as mine:
        return not mine


def _handed(configuration: Configuration) -> dict[str, Any]:
    return configuration.model_dump(mode="json", exclude={"datasets", "sources"})
