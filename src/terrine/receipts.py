"""Charge first: the whole event of a run is charged once, and every later step takes the receipt.

    receipt = paid(path, event, Payment(account))       # before anything is drawn, written or looked at
    receipt.covers(part)                                # in every step, before it draws

The receipt is kept with the run: a run that goes on after an interruption is not charged again. Once the run is over it
is used up, and pays for nothing more (`finish`). A refused charge leaves nothing, not even a folder. A crash between
the charge and its receipt may waste budget; it never hides a spend.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from terrine import files
from terrine.errors import InvalidArgument, OutOfOrder, TerrineError
from terrine.events import Composed, Event, OneOf, RandomStopping, Repeated, Reproducible
from terrine.events.codec import from_dict, to_dict

_ROOM = 512
"""Bytes for the account's name and two hashes."""


class Charged(Protocol):
    """What a run is charged to, such as an account of the ledger."""

    def charge(self, event: Event, *, purpose: str, by: str) -> Any:
        """Record the spend, or raise and record nothing."""
        ...


@dataclass(frozen=True)
class Receipt:
    """Shows that `event` was charged; without an account, that none was asked for."""

    event: Event
    account: str | None = None
    charge: str | None = None
    """The charge's own hash."""
    head: str | None = None
    """The ledger's head after it: write it down elsewhere, and a roll-back is found."""
    place: int | None = None
    """The folder it was made in, by its inode: moved with its folder it holds, in a copy it does not."""
    settings: str = ""
    """A hash of what was asked for: with other settings the same event would be another release."""
    by: str = ""
    at: str = ""
    """When it was charged, or begun where there was nothing to charge: UTC."""
    left: float | None = None
    """The largest epsilon that one more release could have cost after it."""
    finished: bool = False
    """The run is over: whoever takes its results away and gives the same command again pays again."""

    def covers(self, event: Event) -> None:
        """Refuse to go on with what was not paid for.

        Raises:
            OutOfOrder: `event` is not part of what was charged.
        """
        if not _holds(self.event, event):
            raise OutOfOrder(f"{type(event).__name__}: not part of what the run was charged for; want it charged first")

    def record(self) -> dict[str, str | None]:
        """What a report says of it; the account's name is the owner's affair."""
        return {"charge": self.charge, "head": self.head}


@dataclass(frozen=True)
class Payment:
    """Who pays, what for and on whose behalf; `head` asks the ledger for its head."""

    account: Charged | None = None
    purpose: str = "terrine"
    by: str = "terrine"
    head: Callable[[], str] | None = None

    def charge(self, event: Event) -> Receipt:
        """Charge `event`, or raise and charge nothing."""
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if self.account is None:
            return Receipt(event, by=self.by, at=at)
        made = self.account.charge(event, purpose=self.purpose, by=self.by)
        name, head, left = str(getattr(self.account, "name", type(self.account).__name__)), None, None
        with contextlib.suppress(TerrineError):  # the charge is on disk: what fails now must not lose its receipt
            head = None if self.head is None else self.head()
            remaining = getattr(self.account, "remaining", None)
            left = float(remaining().epsilon) if callable(remaining) else None
        return Receipt(event, name, getattr(made, "hash", None), head, by=self.by, at=at, left=left)

    def was_charged(self, receipt: Receipt) -> bool:
        """Whether `receipt` is for this account, or there is none to charge."""
        if self.account is None:
            return True
        if receipt.charge is not None and callable(history := getattr(self.account, "history", None)):
            return any(getattr(one, "hash", None) == receipt.charge for one in history())
        return receipt.account == str(getattr(self.account, "name", type(self.account).__name__))


def paid(path: Path, event: Event, payment: Payment, *, settings: Any) -> Receipt:
    """The receipt at `path`, where the run was begun before; otherwise charge `event` and keep the receipt there.

    `settings` is all that was asked for, as JSON can hold it.

    Raises:
        InvalidArgument: the run was begun, and charged, for another event or with other settings; or nothing can be
            written at `path`.
        BudgetExceeded: the account has not enough left; nothing was charged or written.
    """
    asked = hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()
    kept = _read(path) if unused(path) else None
    if kept is not None and (kept.event, kept.settings) != (event, asked):
        raise InvalidArgument(
            f"{path}: the run was begun, and charged, for something else: its data, its settings or Terrine have "
            "changed since; want them as they were, or a new folder, which is charged anew"
        )
    if kept is not None and payment.was_charged(kept) and (payment.account is None or kept.place == _place(path)):
        return kept
    try:
        with files.unmade_if_refused(path.parent):
            files.private_folder(path.parent)
            with files.written(path, private=True) as file:
                blank = _text(Receipt(event, by=payment.by)) + b" " * _ROOM
                room = file.write(blank)  # there is room for it, or nothing is charged
                file.flush()
                receipt = replace(payment.charge(event), place=_place(path), settings=asked)
                file.seek(0)
                file.write(_text(receipt).ljust(room))
    except OSError as error:
        raise InvalidArgument(
            f"{path}: could not be written ({error.strerror}); want a place that may be written, and room in it"
        ) from error
    return receipt


def unused(path: Path) -> bool:
    """Whether a receipt lies at `path` that still pays: that of a run that was begun, and is not over.

    Raises:
        InvalidArgument: what lies there is no receipt.
    """
    return path.exists() and not _read(path).finished


def finish(path: Path) -> None:
    """Use up the receipt of a run that is over, if there is one."""
    if unused(path):
        files.write(path, _text(replace(_read(path), finished=True)), private=True)


def _place(path: Path) -> int:
    return path.parent.stat().st_ino


def _holds(whole: Event, part: Event) -> bool:
    if whole == part:
        return True
    match whole:
        case Composed(parts=parts) | OneOf(parts=parts):
            return any(_holds(one, part) for one in parts)
        case Reproducible(event=inner) | Repeated(event=inner) | RandomStopping(event=inner):
            return _holds(inner, part)
        case _:
            return False


def _text(receipt: Receipt) -> bytes:
    record: dict[str, Any] = {
        "account": receipt.account,
        **receipt.record(),
        "place": receipt.place,
        "settings": receipt.settings,
        "by": receipt.by,
        "at": receipt.at,
        "left": receipt.left,
        "finished": receipt.finished,
    }
    record["event"] = to_dict(receipt.event)
    return json.dumps(record).encode() + b"\n"


def _read(path: Path) -> Receipt:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names = ("account", "charge", "head", "place", "settings", "by", "at", "left", "finished")
        return Receipt(from_dict(record["event"]), *(record[name] for name in names))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}: not a receipt ({error}); want the one of the run, or a new folder") from None
