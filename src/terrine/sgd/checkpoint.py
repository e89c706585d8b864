"""Checkpoints: a run that was killed at any moment goes on after what it has released, and is never billed less.

    <path>          the model, the optimizer, and how many steps they have seen
    <path>.count    how many steps were released: on disk before each is (`common/release_count.py`)

A run that goes on begins after the count, with fresh noise and fresh lots, from the newest saved model. Steps between
that model and the count are spent. No noise is on disk, and none is used twice, whatever the gradients are by then.

The model is saved after every step while that takes less than a twentieth of the time, else once a minute. An older
model put back costs steps, not privacy; a count that was set back is found where the model beside it has seen more
steps. Where both were set back, or copied and gone on with twice, nothing can tell.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils import _pytree as pytree

from terrine import check, files
from terrine.common.release_count import ReleaseCount
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Composed, Event, Reproducible
from terrine.receipts import Charged
from terrine.sgd.plan import Plan
from terrine.sgd.sharding import is_part, load_model, load_optimizer

_VERSION = 5
_FIELDS = {"version", "run", "plan", "limit", "looks", "charged_to", "taken", "bound", "model", "optimizer", "others"}
_SHARE, _LONGEST = 0.05, 60.0  # of the time that saving may take; seconds after which it is saved all the same


@dataclass
class Checkpoint:
    """Where to keep a run; `every` saves the model each so many steps, None as often as costs little."""

    path: Path
    every: int | None = None

    def __post_init__(self) -> None:
        self.path = Path(self.path).absolute()  # the same file wherever the program goes
        if self.every is not None:
            self.every = check.whole("every", self.every)

    @classmethod
    def at(cls, place: Checkpoint | str | Path | None) -> Checkpoint | None:
        """Return a checkpoint at a path, or itself.

        Raises: InvalidArgument where it is neither.
        """
        if isinstance(place, str | Path):
            return cls(Path(place))
        if not isinstance(place, Checkpoint | None):
            raise check.refuse("checkpoint", place, "a path or a Checkpoint")
        return place

    @property
    def count_path(self) -> Path:
        """Where the count of released steps lies."""
        return self.path.with_name(self.path.name + ".count")


class KeptRun:
    """The files of one run, held by this process; a refused one leaves no new file.

    Raises:
        OutOfOrder: another run holds them, or nothing can be written.
        InvalidArgument: they are of another plan, are none, or the count was set back.
    """

    def __init__(self, checkpoint: Checkpoint, plan: str) -> None:
        self.path, self._every = checkpoint.path, checkpoint.every
        if not self.path.parent.is_dir():
            raise OutOfOrder(f"{self.path.parent}: no such folder; want one that is there for the checkpoint")
        if self.path.exists() and not self.path.is_file():
            kind = "a folder" if self.path.is_dir() else "no regular file"
            raise OutOfOrder(f"{self.path}: {kind}; want a file for the checkpoint")
        self.count = ReleaseCount(checkpoint.count_path)
        self._plan, self._constant = plan, dict[str, Any]()
        self._others: dict[str, Any] = {}
        self._saved_at, self._seconds, self._last = -1, 0.0, time.monotonic()
        try:
            self.record = self._load() if self.path.exists() else None
            self._check()
            self._saved_at = -1 if self.record is None else self.count.number  # there is nothing newer to save
        except BaseException:
            if self.count.is_new:
                self.count.remove()
            self.count.close()
            raise

    def begin(self, **constant: Any) -> None:
        """Note what stays the same for the whole run."""
        self._constant = constant

    def abandon(self) -> None:
        """Let go of the files, and remove a count with which nothing was begun."""
        if self.count.is_new and not self.path.exists():
            self.count.remove()
        self.count.close()

    def keep(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Save these too, and restore them now where a run goes on; return what they were restored to.

        Raises: InvalidArgument where one has no state, or another than was saved.
        """
        saved = {} if self.record is None else self.record["others"]
        for name, other in others.items():
            if not all(callable(getattr(other, method, None)) for method in ("state_dict", "load_state_dict")):
                raise InvalidArgument(
                    f"keep({name}=): a {type(other).__name__}; want something with state_dict() and load_state_dict()"
                )
            self._others[name] = other
            if name in saved:
                with _as_another(f"{self.path}: {name} was saved of another kind"):
                    other.load_state_dict(saved[name])
        return {name: saved[name] for name in others if name in saved}

    def is_due(self, taken: int) -> bool:
        """Whether to save after so many steps."""
        if taken == self._saved_at:
            return False
        if self._every is not None:
            return taken % self._every == 0
        waited = time.monotonic() - self._last
        return self._seconds <= _SHARE * waited or waited >= _LONGEST

    def is_saved(self, taken: int) -> bool:
        """Whether this step's model was saved."""
        return taken == self._saved_at

    def save(self, taken: int, bound: float, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Write everything, in one rename; `model` and `optimizer` are their states.

        Raises:
            OutOfOrder: it cannot be written, or the run was closed.
            InvalidArgument: something that is kept could not be read again.
        """
        if not self.count.is_open:
            raise OutOfOrder(f"{self.path}: the run was closed, and another may go on from it; want save() before that")
        begun = time.monotonic()
        others = {} if self.record is None else self.record["others"]
        others = {**others, **{name: other.state_dict() for name, other in self._others.items()}}
        if any(map(is_part, pytree.tree_leaves(others))):
            raise InvalidArgument(
                f"{self.path}: {', '.join(self._others)}: tensors that are sharded, of which this process has a part; "
                "want keep() for what is whole, such as a schedule"
            )
        record = {
            "version": _VERSION, "run": self._run(), "plan": self._plan, **self._constant,
            "taken": taken, "bound": bound, "model": dict(model), "optimizer": dict(optimizer),
            "others": others,
        }  # fmt: skip
        buffer = io.BytesIO()
        torch.save(record, buffer)
        buffer.seek(0)
        if strange := get_unsafe_globals_in_checkpoint(buffer):
            raise InvalidArgument(
                f"{self.path}: {', '.join(sorted(strange))} in what is kept could not be read again; want tensors, "
                "plain numbers, texts and containers of them in every state_dict()"
            )
        try:
            files.write(self.path, buffer.getvalue(), private=True)
        except OSError as error:
            raise OutOfOrder(
                f"{self.path}: the checkpoint could not be written ({error.strerror}); want a place that may be "
                "written, with room, and go on"
            ) from error
        self._saved_at, self._last = taken, time.monotonic()
        self._seconds = self._last - begun

    def _run(self) -> str:
        """Which run it is: a digest of all of its secret, so that a count with another is found."""
        return hashlib.sha256(b"terrine run " + self.count.secret).hexdigest()

    def _load(self) -> dict[str, Any]:
        try:
            record = torch.load(self.path, weights_only=True, map_location="cpu")
        except OSError as error:
            raise OutOfOrder(f"{self.path}: the checkpoint could not be read ({error.strerror})") from error
        except Exception as error:
            raise self._strange(type(error).__name__) from None
        if not isinstance(record, dict) or (missing := sorted(_FIELDS - set(record))):
            raise self._strange(f"{missing[0]} is missing" if isinstance(record, dict) else type(record).__name__)
        if record["version"] == _VERSION and not (type(record["taken"]) is int and isinstance(record["others"], dict)):
            raise self._strange(f"taken={record['taken']!r:.20}")
        return record

    def _strange(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: not a checkpoint ({why}); remove it or choose another")

    def _check(self) -> None:
        number, record = self.count.number, self.record
        if record is None:
            if number:
                raise InvalidArgument(
                    f"{self.path} is missing, after {number} released steps; want it as it was, or another path, where "
                    "a fresh run has to be paid for"
                )
            return
        if record["version"] != _VERSION:
            raise self._strange(f"of version {record['version']}, want {_VERSION}")
        if record["plan"] != self._plan:
            raise InvalidArgument(f"{self.path}: a run of another plan, {record['plan']}; want that, or another path")
        if self.count.is_new or record["run"] != self._run():
            raise InvalidArgument(
                f"{self.count.path}: the count of this run's released steps is missing, or another run's; want the "
                "one beside the checkpoint, or another path, where a fresh run has to be paid for"
            )
        if record["taken"] > number:
            raise InvalidArgument(
                f"{self.count.path}: counts {number} released steps, the model beside it has seen {record['taken']}: "
                "an older copy, after which steps would be released twice; want the newest"
            )


def open_run(
    place: Checkpoint | None, plan: Plan, limit: int, looks: Event | None, kept: list[KeptRun]
) -> tuple[int, float | None, bytes | None, Any]:
    """Open the checkpoint; return how many steps were released, the bound, the run's secret, and what was saved."""
    if place is None:
        return 0, None, None, None
    run = KeptRun(place, describe_plan(plan))
    kept.append(run)
    if run.record is None:
        return 0, None, run.count.secret, None
    _check_record(run, limit, looks)
    return run.count.number, run.record["bound"], run.count.secret, (run.record["model"], run.record["optimizer"])


def charge_run(
    account: Charged | None, plan: Plan, limit: int, looks: Event | None, kept: list[KeptRun], purpose: str, by: str
) -> None:
    """Charge the account, if it was not for this run."""
    record = kept[0].record if kept else None
    receipt = None if record is None else record["charged_to"]
    if account is not None and not _is_charged(account, receipt):
        event = plan.event_after(limit)
        if looks is not None:
            event = Composed([event, looks if plan.seed is None else Reproducible(looks)])
        receipt = _receipt(account, account.charge(event, purpose=purpose, by=by))
    for run in kept:
        run.begin(limit=limit, looks=repr(looks), charged_to=receipt)


def _check_record(kept: KeptRun, limit: int, looks: Event | None) -> None:
    assert kept.record is not None
    if kept.record["limit"] != limit:
        begun = f"the run in {kept.path} was begun, and charged, for {kept.record['limit']} steps"
        raise InvalidArgument(f"limit={limit}: {begun}")
    if kept.record["looks"] != repr(looks):
        raise InvalidArgument(f"validation: the run in {kept.path} was begun, and charged, with another")


def _receipt(account: Charged, charge: Any) -> str:
    """What shows later that this account was charged: the charge's own hash, or the account's name."""
    return str(getattr(charge, "hash", None) or getattr(account, "name", type(account).__name__))


def _is_charged(account: Charged, receipt: str | None) -> bool:
    if receipt is None:
        return False
    if callable(history := getattr(account, "history", None)):
        return any(getattr(charge, "hash", None) == receipt for charge in history())
    return receipt == _receipt(account, None)


def load_run(path: Path, model: nn.Module, optimizer: Optimizer, state: tuple[Any, Any]) -> None:
    """Bring model and optimizer to where they were saved.

    Raises: InvalidArgument where they are others.
    """
    with _as_another(f"{path}: a run of another model or optimizer"):
        groups = zip(state[1]["param_groups"], optimizer.param_groups, strict=False)
        differing: set[str] = set().union(*(set(saved) ^ set(own) for saved, own in groups)) - {"initial_lr"}
        if differing:
            raise ValueError(f"one of them has no {min(differing)}")
        load_model(model, state[0])
        load_optimizer(optimizer, state[1])


@contextmanager
def _as_another(what: str) -> Iterator[None]:
    """Say what is another where a state does not fit.

    Raises: InvalidArgument
    """
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidArgument(f"{what} ({reason})") from None


def describe_plan(plan: Plan) -> str:
    """Return a plan in words that are the same in every process: without the addresses of its functions."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(plan))


__all__ = ["Checkpoint", "KeptRun", "charge_run", "describe_plan", "load_run", "open_run"]
