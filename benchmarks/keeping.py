"""What a benchmark measured, kept on disk as soon as it is there: a command that is started again goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def once(
    path: Path, settings: dict[str, Any], make: Callable[[], dict[str, Any]], *, under: str = "settings"
) -> dict[str, Any]:
    """What `make` found with these settings: read back, or measured now and kept with its CPU seconds.

    The settings themselves are kept `under` a name.
    """
    settings = json.loads(json.dumps(settings))
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if found[under] == settings:
            return found
    began = time.process_time()
    found = make() | {under: settings}
    found["cpu_seconds"] = round(time.process_time() - began, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=2) + "\n")
    part.replace(path)
    return found
