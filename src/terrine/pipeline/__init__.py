"""The main job: from private data to a trained, billed and audited model in one folder.

from terrine import pipeline

pipeline.train(pipeline.Settings(data="digits", epsilon=3.0), "run")
pipeline.load("run").predict(rows)
"""

from __future__ import annotations

from terrine.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra("torch", extra="torch") from error

from terrine.pipeline.folder import Folder
from terrine.pipeline.job import train
from terrine.pipeline.settings import Settings
from terrine.pipeline.trained import Trained, load

__all__ = ["Folder", "Settings", "Trained", "load", "train"]
