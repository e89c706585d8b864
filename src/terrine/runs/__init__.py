"""The main job: from private data to a trained, billed and audited model in one folder.

from terrine import runs

runs.train(runs.Settings(data="digits", epsilon=3.0), "run")
runs.load("run").predict(rows)
"""

from __future__ import annotations

from terrine.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra("torch", extra="torch") from error

from terrine.runs.folder import Folder
from terrine.runs.job import train
from terrine.runs.settings import Settings
from terrine.runs.trained import Trained, load

__all__ = ["Folder", "Settings", "Trained", "load", "train"]
