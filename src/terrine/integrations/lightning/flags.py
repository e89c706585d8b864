"""Flags of Lightning's Trainer, and hooks of modules and callbacks, that a plan does not allow."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins.precision import Precision

from terrine.integrations import loops
from terrine.sgd import Plan

ACCUMULATED = "a step is the plan's lot, taken in microbatches that fit"
_BEFORE_THE_MODEL = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_NEVER_CALLED = ("backward", "configure_gradient_clipping", "on_before_backward", "on_after_backward")
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def wrong_flags(trainer: Trainer, plan: Plan, precision: Any) -> list[str]:
    """Flags that the plan does not allow, and why."""
    per_epoch = min(loops.steps_per_epoch(plan), plan.steps)
    epochs = trainer.max_epochs
    wanted = {
        "max_steps": (trainer.max_steps, trainer.max_steps == plan.steps, f"want the plan's {plan.steps}"),
        "max_epochs": (
            epochs,
            epochs in (None, -1) or epochs * per_epoch >= plan.steps,
            f"want none, or enough for the plan's {plan.steps} steps of {per_epoch} an epoch",
        ),
        "accumulate_grad_batches": (
            trainer.accumulate_grad_batches, trainer.accumulate_grad_batches == 1, f"want 1; {ACCUMULATED}"
        ),
        "gradient_clip_val": (
            trainer.gradient_clip_val, not trainer.gradient_clip_val, "want none; the plan clips each example's"
        ),
        "precision": (type(precision).__name__, type(precision) is Precision, "want 32-true"),
        "limit_train_batches": (
            trainer.limit_train_batches, trainer.limit_train_batches == 1.0, "want 1.0; the plan counts its lots"
        ),
        "overfit_batches": (trainer.overfit_batches, not trainer.overfit_batches, "want 0; the plan draws the lots"),
        "fast_dev_run": (trainer.fast_dev_run, not trainer.fast_dev_run, "want False, or no private data"),
    }  # fmt: skip
    return [f"{name}={value!r}: {why}" for name, (value, fits, why) in wanted.items() if not fits]


def wrong_hooks(trainer: Trainer, module: LightningModule) -> list[str]:
    """Hooks that could mix examples before the model sees them, or that would never be called."""
    wrong = [
        f"{type(one).__name__}: tries lots, or puts several into one step; want settings found on public data"
        for one in trainer.callbacks
        if isinstance(one, LearningRateFinder | BatchSizeFinder | GradientAccumulationScheduler)
    ]
    if "training_step" in vars(module):
        wrong.append("training_step: replaced on the module, as by torch.compile; want the module itself")
    if not module.automatic_optimization:
        wrong.append("automatic_optimization=False: a module that steps by itself; want automatic optimisation")
    for holder in (module, trainer.datamodule):
        for name in _BEFORE_THE_MODEL:
            if holder is not None and _is_own(holder, name):
                why = "sees a whole lot, and could mix its examples; want that in training_step, or in the data set"
                wrong.append(f"{type(holder).__name__}.{name}: {why}")
    wrong += [f"{type(module).__name__}.{name}: {_UNCALLED}" for name in _NEVER_CALLED if _is_own(module, name)]
    for holder in (module, *trainer.callbacks):
        for name in _HOOKS[2:] if holder is module else _HOOKS:
            if _is_own(holder, name):
                wrong.append(f"{type(holder).__name__}.{name}: {_UNCALLED}")
    return wrong


_UNCALLED = "would look at gradients before the noise, and is not called in a private run; want none"


def _is_own(holder: Any, name: str) -> bool:
    """Whether somebody has written this hook: it is not the library's own."""
    found = getattr(type(holder), name, None)
    return found is not None and not str(getattr(found, "__module__", "")).startswith("lightning.")
