"""One training in a process of its own: `python -m terrine.gateway.worker`, told by a server what to run.

It charges before it looks, by the receipt in its folder, and goes on by the same receipt after whatever ended it. What
goes wrong after the charge is not said to the analyst: it may depend on private rows. The job's log, which is the
owner's, says it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import update

from terrine import accounting, verify
from terrine.errors import BudgetExceeded, InvalidArgument, LedgerUnavailable, OutOfOrder, TerrineError
from terrine.events import Event, from_json
from terrine.gateway import members, requests, schema
from terrine.gateway.bodies import DatasetBody, TrainBody
from terrine.gateway.configuration import Configuration
from terrine.gateway.database import Database
from terrine.gateway.trainings import end, holding, settings_of

_LOOK, _PATIENCE = 1.0, 60.0


def main() -> None:
    """Read from standard input what to run, and run it."""
    told = json.load(sys.stdin)
    run(Configuration.model_validate(told["configuration"]), str(told["request"]))


def run(configuration: Configuration, request: str) -> None:
    """Run one training to its end, unless somebody else does."""
    jobs = configuration.path(configuration.jobs)
    with holding(jobs / f"{request}.lock") as mine:
        if not mine:
            return
        database = Database(configuration.database)
        with database.read() as session:
            row = requests.find(session, request)
            declared = session.execute(
                schema.DATASETS.select().where(schema.DATASETS.c.dataset == row["dataset"])
            ).one()
        if row["state"] not in requests.OPEN:
            return
        watch = _Watch(database, request)
        try:
            _train(configuration, database, row, DatasetBody.model_validate_json(declared.declaration), watch)
        except LedgerUnavailable:
            traceback.print_exc()  # the next attempt goes on
        except BudgetExceeded:
            traceback.print_exc()
            _ended(database, row, "the data set's budget does not hold it")
        except Exception:
            traceback.print_exc()
            _ended(
                database, row, "failed; why is withheld, because it may depend on private rows; tell the data's owner"
            )


def _train(
    configuration: Configuration, database: Database, row: dict[str, Any], declared: DatasetBody, watch: _Watch
) -> None:
    from terrine import pipeline

    settings = settings_of(TrainBody.model_validate_json(row["asked"]), declared)
    jobs = configuration.path(configuration.jobs)
    key = None if configuration.key is None else configuration.path(configuration.key)
    os.chdir(configuration.path(configuration.data))  # a run's folder names its table: as the owner registered it
    account = _Paying(database, row, jobs / row["request"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = pipeline.train(
            settings,
            jobs / row["request"],
            account=account,
            purpose=requests.purpose(row),
            by=row["member"],
            head=account.head,
            progress=watch.stage,
            sign=key,
        )
    verify.refuse_lies(folder.path)
    names = _zipped(folder.path, jobs / f"{row['request']}.zip")
    privacy = {name: value for name, value in folder.read("privacy.json").items() if name != "events"}
    answer = {"privacy": privacy, "results": folder.read("results.json"), "files": names}
    with database.write() as session:
        told = {"answer": json.dumps(answer, allow_nan=False), "progress": "finished", "said": ""}
        requests.move(session, database, row["request"], ("charged",), "answered", **told)


def _zipped(folder: Path, target: Path) -> list[str]:
    """An archive of what may be handed on, and of nothing else."""
    from terrine.pipeline.folder import PUBLIC_FILES

    names = sorted(name for name in PUBLIC_FILES if (folder / name).is_file())
    draft = target.with_suffix(".part")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.write(folder / name, name)
    draft.replace(target)
    return names


def _ended(database: Database, row: dict[str, Any], said: str) -> None:
    with contextlib.suppress(TerrineError), database.write() as session:
        end(session, database, row, "failed", said)


class _Paying:
    """The data set's account, as a run charges it: for this request, at most at its price, and once."""

    def __init__(self, database: Database, row: dict[str, Any], folder: Path) -> None:
        self._database, self._row, self._folder = database, row, folder
        self._account = database.ledger.account(row["dataset"])
        self.name, self.unit, self.budget = self._account.name, self._account.unit, self._account.budget
        self.head, self.history, self.remaining = self._account.head, self._account.history, self._account.remaining

    def charge(self, event: Event, *, purpose: str, by: str) -> Any:
        """Charge the run; a charge whose receipt was never written is taken up: nothing was done by it."""
        from terrine.pipeline.folder import RECEIPT

        row = self._row
        with self._database.write() as session:
            now = requests.find(session, row["request"], lock=True)
            made = requests.charge_of(session, row)
            if now["state"] not in requests.OPEN:
                raise OutOfOrder("the training was ended")
            _still_lent(session, row)
            if made is not None:
                if (self._folder / RECEIPT).exists() or from_json(made["event"]) != event:
                    raise OutOfOrder("the training was charged before, and not for this: its data have changed")
                requests.move(session, self._database, row["request"], requests.OPEN, "charged", charge=made["hash"])
                return SimpleNamespace(hash=made["hash"])
        if schema.price(accounting.epsilon(event, delta=float(row["delta"]))) > row["price"]:
            raise InvalidArgument("the training costs more than when it was asked: its data have changed")
        with self._database.turn:
            charge = self._account.charge(event, purpose=purpose, by=by)
        with self._database.write() as session:
            told = {"charge": charge.hash}
            if not requests.move(session, self._database, row["request"], requests.OPEN, "charged", **told):
                # it was cancelled in between, and its price given back: it was charged all the same
                mine = schema.REQUESTS.c.request == row["request"]
                said = "cancelled while it was being charged; it stays charged; it can be resumed"
                session.execute(update(schema.REQUESTS).where(mine).values(charge=charge.hash, said=said))
                _count_again(session, row)
                cancelled = True
            else:
                cancelled = False
        if cancelled:
            raise OutOfOrder("the training was cancelled")
        return charge


def _still_lent(session: Any, row: dict[str, Any]) -> None:
    """Charge nobody who has lost the data set since, and no data set that was closed."""
    member = members.find(session, row["dataset"], row["member"])
    lent = session.execute(schema.DATASETS.select().where(schema.DATASETS.c.dataset == row["dataset"])).first()
    if member is None or member["revoked"] or member["role"] != "analyst" or lent is None or lent.closed:
        raise OutOfOrder("the data set is not lent any more")


def _count_again(session: Any, row: dict[str, Any]) -> None:
    if row["counted"]:
        members.count_again(session, row)


class _Watch:
    """Says how far the run is, and ends the process once the request is no longer open."""

    def __init__(self, database: Database, request: str) -> None:
        self._database, self._request = database, request
        self._said = ""
        threading.Thread(target=self._look, name="watch", daemon=True).start()
        self._say("starting")

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A stage of the run, as the pipeline calls it."""
        self._say(title)
        yield None
        self._say("training")

    def _say(self, said: str) -> None:
        with contextlib.suppress(TerrineError), self._database.write() as session:
            mine = schema.REQUESTS.c.request == self._request
            session.execute(update(schema.REQUESTS).where(mine).values(progress=said))

    def _look(self) -> None:
        seen = time.monotonic()
        while True:
            time.sleep(_LOOK)
            try:
                with self._database.read() as session:
                    state = requests.find(session, self._request)["state"]
                seen = time.monotonic()
            except TerrineError:
                if time.monotonic() - seen > _PATIENCE:
                    os._exit(3)  # the database is gone: the next server goes on with the training
                continue
            if state not in (*requests.OPEN, "answered"):
                os._exit(4)


if __name__ == "__main__":
    main()
