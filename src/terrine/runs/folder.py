"""A run's folder: what lies where, written whole or not at all.

run.json             what was asked for (public)
privacy.json         the claim: events, certified epsilon, delta, unit, neighbours, sampler, versions (public)
model.safetensors    the trained weights; model.json says how to build and feed them (public)
model_card.md        the model in words (public)
results.json         accuracies, and what each was measured on (public)
report.html          the page for the data owner and the privacy officer; holds the audit's findings
audit/               the audit's scores and coins: private, as the data is
owner/               checkpoint, coins, teachers: private, not needed once the run is over
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument
from terrine.runs.settings import Settings

MODEL, WEIGHTS, PRIVACY, RESULTS = "model.json", "model.safetensors", "privacy.json", "results.json"
REPORT, CARD, ASKED = "report.html", "model_card.md", "run.json"
_BEGUN = {"owner", f".{ASKED}.part"}  # all that is left of a run that ended before it could write what was asked for


class Folder:
    """One run's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.owner = self.path / "owner"

    def begin(self, settings: Settings) -> None:
        """Take the folder for this run, or go on with it where it is this run's already.

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
        try:
            self.owner.mkdir(parents=True, exist_ok=True)
            self.owner.chmod(0o700)
        except OSError as error:
            raise InvalidArgument(
                f"{self.path}: the folder could not be made ({error.strerror}); want a place that may be written"
            ) from error
        if not (self.path / ASKED).exists():
            self.write(ASKED, settings.as_dict())

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return all((self.path / name).exists() for name in (PRIVACY, RESULTS, MODEL, WEIGHTS))

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
        target = self.path / name
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise InvalidArgument(
                f"{target}: could not be written ({error.strerror}); make room and give the same command to go on"
            ) from error
