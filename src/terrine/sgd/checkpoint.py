"""Checkpoints: a run that was killed at any moment goes on after what it has released, and is never billed less.

    <path>          the model, the optimizer, and how many steps they have seen
    <path>.count    how many steps were released: on disk before each is (`common/release_count.py`)

A run that goes on begins after the count, with fresh noise and fresh lots, from the newest saved model. Steps between
that model and the count are spent. No noise is on disk, and none is used twice, whatever the gradients are by then.

The model is saved after every step while that takes less than a twentieth of the time, else once a minute. Saving it
older copies over newer ones costs steps, not privacy; a count that was set back is found where the model beside it has
seen more steps. Where both were set back nothing can tell.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from terrine import check, files
from terrine.common.release_count import ReleaseCount
from terrine.errors import InvalidArgument, OutOfOrder

_VERSION = 5
_FIELDS = {"version", "run", "plan", "limit", "looks", "charged_to", "taken", "bound", "model", "optimizer", "others"}
_SHARE, _LONGEST = 0.05, 60.0  # of the time that saving may take; seconds after which it is saved all the same


@dataclass
class Checkpoint:
    """Where to keep a run; `every` saves the model each so many steps, None as often as costs little."""

    path: Path
    every: int | None = None

    def __post_init__(self) -> None:
        self.path = Path(self.path)
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
    """The files of one run, held by this process.

    Raises:
        OutOfOrder: another process holds them, or nothing can be written.
        InvalidArgument: they are of another plan, are none, or the count was set back.
    """

    def __init__(self, checkpoint: Checkpoint, plan: str) -> None:
        self.path, self._every = checkpoint.path, checkpoint.every
        if not self.path.parent.is_dir():
            raise OutOfOrder(f"{self.path.parent}: no such folder; want one that is there for the checkpoint")
        if self.path.is_dir():
            raise OutOfOrder(f"{self.path}: a folder; want a file for the checkpoint")
        self.count = ReleaseCount(checkpoint.count_path)
        self._plan, self._constant = plan, dict[str, Any]()
        self._others: dict[str, Any] = {}
        self._saved_at, self._seconds, self._last = -1, 0.0, time.monotonic()
        try:
            self.record = self._load() if self.path.exists() else None
            self._check()
        except BaseException:
            self.count.close()
            raise

    def begin(self, **constant: Any) -> None:
        """Note what stays the same for the whole run."""
        self._constant = constant

    def restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Bring model and optimizer to where they were saved.

        Raises: InvalidArgument where they are others.
        """
        assert self.record is not None
        settings = [set(group) for group in optimizer.state_dict()["param_groups"]]
        try:
            if settings != [set(group) for group in self.record["optimizer"]["param_groups"]]:
                raise ValueError(f"an optimizer with other settings than {type(optimizer).__name__} has")
            model.load_state_dict(self.record["model"])
            optimizer.load_state_dict(self.record["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"{self.path}: a run of another model or optimizer ({reason})") from None
        self._saved_at = self.count.number  # there is nothing newer to save

    def keep(self, others: Mapping[str, Any]) -> None:
        """Save these too, and restore them now where a run goes on."""
        for name, other in others.items():
            self._others[name] = other
            if self.record is not None and name in self.record["others"]:
                other.load_state_dict(self.record["others"][name])

    def is_due(self, taken: int) -> bool:
        """Whether to save after so many steps."""
        if taken == self._saved_at:
            return False
        if self._every is not None:
            return taken % self._every == 0
        waited = time.monotonic() - self._last
        return self._seconds <= _SHARE * waited or waited >= _LONGEST

    def save_once(self, taken: int, bound: float, model: nn.Module, optimizer: Optimizer) -> None:
        """Save, unless this step's model was saved."""
        if taken != self._saved_at:
            self.save(taken, bound, model, optimizer)

    def save(self, taken: int, bound: float, model: nn.Module, optimizer: Optimizer) -> None:
        """Write everything, in one rename.

        Raises:
            OutOfOrder: it cannot be written.
        """
        begun = time.monotonic()
        record = {
            "version": _VERSION, "run": self._run(), "plan": self._plan, **self._constant,
            "taken": taken, "bound": bound, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }  # fmt: skip
        buffer = io.BytesIO()
        torch.save(record, buffer)
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
        if self.count.is_new:
            self.count.remove()
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


__all__ = ["Checkpoint", "KeptRun"]
