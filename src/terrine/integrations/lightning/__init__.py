"""PyTorch Lightning, made private: `PrivateStrategy`.

    strategy   the loop's seams: lots, the closure, the step, checkpoints
    flags      what a Trainer, its callbacks and a module may ask for under a plan
    logs       what may be logged

The LightningModule stays as it is.
"""

from terrine.errors import MissingExtra

try:
    import lightning  # noqa: F401
except ImportError as error:
    raise MissingExtra("lightning", extra="lightning") from error

from terrine.integrations.lightning.strategy import PrivateStrategy

__all__ = ["PrivateStrategy"]
