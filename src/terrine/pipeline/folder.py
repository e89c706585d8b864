"""A run's folder: what lies where, for whose eyes, written whole or not at all.

run.json             what was asked for                                                                   public
events.json          what was done to the private rows, as the accountant reads it                       public
manifest.json        the SHA-256 hashes of what is handed on, and the claim (`terrine verify`)            public
privacy.json         the claim: events, certified epsilon, delta, unit, neighbours, sampler, versions     public
model.safetensors    the trained weights; model.json says how to build and feed them                      public
model_card.md        the model in words                                                                   public
results.json         accuracies, and what each was measured on                                            public
report.html          the page for the data owner and the privacy officer: holds the audit's findings      private
audit/               the audit's scores and coins: private, as the data is                                private
owner/               receipt, checkpoint, coins, teachers: not needed once the run is over                private

Public files are 0644 and may be handed on; private ones are 0600. The folder itself, as every folder in it, is 0700.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from terrine import files
from terrine.errors import InvalidArgument
from terrine.pipeline.settings import Settings
from terrine.verify.manifest import (
    ASKED,
    CARD,
    EVENTS,
    HANDED_ON,
    MANIFEST,
    MAY_BE_HANDED_ON,
    MODEL,
    PRIVACY,
    RESULTS,
    SIGNED,
    WEIGHTS,
)

__all__ = ["ASKED", "CARD", "EVENTS", "MODEL", "PRIVACY", "RECEIPT", "REPORT", "RESULTS", "WEIGHTS", "Folder"]

REPORT, RECEIPT = "report.html", "owner/receipt.json"
PUBLIC_FILES = frozenset({*HANDED_ON, *MAY_BE_HANDED_ON, MANIFEST, SIGNED})
"""What may be handed on: it was paid for, or made without a look at the rows."""
PRIVATE_FILES = frozenset({REPORT})
"""What stays with the owner, beside all that lies in `PRIVATE_FOLDERS`."""
PRIVATE_FOLDERS = frozenset({"owner", "audit"})
_BEGUN = {"owner", f".{ASKED}.part"}  # all that is left of a run that ended before it could write what was asked for


def is_private(name: str) -> bool:
    """Whether a file of a run's folder is the owner's alone.

    Raises:
        KeyError: nobody has decided that.
    """
    if name in PUBLIC_FILES:
        return False
    if name in PRIVATE_FILES or Path(name).parts[0] in PRIVATE_FOLDERS:
        return True
    raise KeyError(f"{name}: in neither list of terrine.pipeline.folder")


class Folder:
    """One run's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.owner = self.path / "owner"

    def check(self, settings: Settings) -> None:
        """Refuse a folder that cannot become, or go on with, this run; nothing is written.

        Raises:
            InvalidArgument: the folder holds another run, or something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgument(f"{self.path}: a file; want a new folder for the run")
        if (self.path / ASKED).exists():
            kept = self.read(ASKED)
            if differing := settings.differences(kept):
                name = differing[0]
                raise InvalidArgument(
                    f"{self.path} holds another run ({name}={kept.get(name)!r} there, {getattr(settings, name)!r} "
                    "asked for): want a new folder, or the same command to go on"
                )
        elif self.path.is_dir() and {path.name for path in self.path.iterdir()} - _BEGUN:
            raise InvalidArgument(f"{self.path} holds files that are not of a run: want a new or empty folder")

    def begin(self, settings: Settings) -> None:
        """Take the folder for this run, or go on with it where it is this run's already.

        Raises:
            InvalidArgument: the folder holds another run, or something else.
        """
        self.check(settings)
        if not (self.path / ASKED).exists():
            self.make()
            self.write(ASKED, settings.as_dict())

    def make(self) -> None:
        """Make the folder and its private part.

        Raises:
            InvalidArgument: they cannot be made.
        """
        try:
            files.private_folder(self.path)
            files.private_folder(self.owner)
        except OSError as error:
            raise InvalidArgument(
                f"{self.path}: the folder could not be made ({error.strerror}); want a place that may be written"
            ) from error

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return all((self.path / name).exists() for name in (*HANDED_ON, MANIFEST))

    def has(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.path / name).exists()

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder.

        Raises:
            InvalidArgument: it is not there, or is not JSON.
        """
        try:
            found: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidArgument(
                f"{self.path / name} is missing: want the folder of a finished terrine train"
            ) from None
        except json.JSONDecodeError as error:
            raise InvalidArgument(f"{self.path / name}: not JSON ({error}); the folder is damaged") from None
        return found

    def write(self, name: str, record: dict[str, Any]) -> None:
        """A JSON file, whole or not at all."""
        self.write_text(name, json.dumps(record, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """A file, whole or not at all."""
        with self.written(name) as file:
            file.write(text.encode())

    @contextmanager
    def written(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write, whole or not at all, readable by whom it is for."""
        target = self.path / name
        try:
            with files.written(target, private=is_private(name)) as file:
                yield file
        except OSError as error:
            raise InvalidArgument(
                f"{target}: could not be written ({error.strerror}); make room and give the same command to go on"
            ) from error
