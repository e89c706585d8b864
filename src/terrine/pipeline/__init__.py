"""The main job: from private data to a trained, billed and audited model in one folder.

    from terrine import pipeline

    pipeline.train(pipeline.Settings(data="digits", epsilon=3.0), "run")
    pipeline.load("run").predict(rows)

`terrine train` is this from a shell; `Settings` has a field for each of its options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrine.errors import MissingExtra
from terrine.pipeline.folder import Folder
from terrine.pipeline.settings import Settings

if TYPE_CHECKING:
    from terrine.pipeline.job import train
    from terrine.pipeline.trained import Trained, load

__all__ = ["Folder", "Settings", "Trained", "load", "train"]


def __getattr__(name: str) -> Any:
    """What trains or predicts needs torch; reading a folder and writing its report do not."""
    if name not in ("Trained", "load", "train"):
        raise AttributeError(f"module 'terrine.pipeline' has no attribute {name!r}")
    try:
        from terrine.pipeline import job, trained
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", extra="torch") from error
    return getattr(job if name == "train" else trained, name)
