"""A federation between two rounds, on disk: a run that was killed goes on to the same model, and is not charged again.

All randomness of a run comes from its key, so a repeated round has its old clients, its old local steps and its old
noise, and releases nothing new. That argument needs the same data and settings: fingerprints of both are compared
before a run goes on. It is kept as a run of `terrine.sgd` is (`sgd/sealed.py` has the files and the argument), with
rounds for steps: a few numbers of a round's exact sum are noted before it is opened, and a repeated round whose sum is
another is refused.

A federation takes the run over at its first round. Of two that go on from one file, the second to open one is refused,
or, where the first has opened a round and not yet saved it, must come to the same sum; the first is then refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from terrine import check
from terrine.common.keys import Key
from terrine.errors import InvalidArgument
from terrine.sgd.sealed import Loaded, SealedFile

_FIELDS = {"rounds", "model", "optimizer", "history", "bound", "turns", "paid"}


class FederationCheckpoint:
    """The file of one run."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise check.refuse("checkpoint", path, "a path, or nothing")
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise check.refuse("checkpoint", path, "a file in a folder that exists")
        self._file = SealedFile(self.path, _FIELDS)
        self._prints: dict[str, str] = {}

    def open(self, plan: str, rounds: int, prints: Mapping[str, str]) -> Loaded | None:
        """What is there to go on from; None where nothing is. `prints` are fingerprints of all that decides updates.

        Raises:
            InvalidArgument: the file is of another plan, of other data or settings, was changed, or is none.
            OutOfOrder: nothing can be written there.
        """
        self._file.demand_room()
        self._prints = dict(prints)
        loaded = self._file.load(plan)
        if loaded is not None and loaded.key is not None:
            self._file.demand_same(loaded, self._prints)
        elif loaded is not None:
            if loaded.record["rounds"] < rounds:
                raise InvalidArgument(f"{self.path}: its secrets are gone, so the run cannot go on; want another path")
            self._file.clear()
        return loaded

    def take_over(self, rounds: int) -> None:
        """Be the one that goes on, after so many rounds.

        Raises:
            InvalidArgument: the notes of rounds are not of this run.
            OutOfOrder: another went on with the run, or nothing can be written.
        """
        if not self._file.held:
            self._file.take_over(rounds)

    def before_release(self, round_: int, total: Tensor) -> None:
        """Note a round's exact sum; refuse a repeated round that has another.

        Raises:
            InvalidArgument: it has.
            OutOfOrder: the note cannot be written, or another went on with the run; nothing was released.
        """
        try:
            self._file.before_release(round_, {"sum": total})
        except InvalidArgument:
            raise InvalidArgument(
                f"round {round_ + 1} was begun before, with other updates; its noise must not be used twice; want the "
                "clients and their training as they were, or another path, where a fresh run has to be paid for"
            ) from None

    def save(self, record: dict[str, Any], key: Key, *, over: bool) -> None:
        """Write everything, in one rename; without the secrets where the run is over.

        Raises:
            OutOfOrder: it cannot be written, or another went on with the run.
        """
        if over:
            self._file.finish(record)
        else:
            self._file.save(record, record["rounds"], key, self._prints)
