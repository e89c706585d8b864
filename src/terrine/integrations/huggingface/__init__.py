"""transformers, made private: `PrivateTrainer`.

    trainer     the Trainer: steps, losses of one example, logs and checkpoints
    arguments   what TrainingArguments and data collators may do under a plan

An ordinary script keeps its model, arguments and data; the plan replaces its sampler.
"""

from terrine.errors import MissingExtra

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtra("transformers or accelerate", extra="huggingface") from error

from terrine.integrations.huggingface.trainer import PrivateTrainer

__all__ = ["PrivateTrainer"]
