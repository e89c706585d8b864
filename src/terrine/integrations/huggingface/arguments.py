"""`TrainingArguments` and data collators under a plan: each is free, set by the plan, or refused by name.

Every argument that this file does not know must have its default: an argument of a later version is refused until
somebody has looked at what it does to examples, gradients and logs. Texts are padded or cut to a public length, each by
itself: a lot padded to its longest text tells every example of another, and a model that reads padding would mix them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from transformers import DataCollatorWithPadding, TrainingArguments

from terrine import check
from terrine.errors import InvalidArgument
from terrine.integrations.loops import steps_per_epoch
from terrine.sgd import Plan

_AFTER_THE_NOISE = """
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon"""
_ON_ONE_EXAMPLE = """
    label_smoothing_factor gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
    activation_checkpointing_kwargs use_cache neftune_noise_alpha tf32 remove_unused_columns label_names"""
_READING = """
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order use_cpu no_cuda local_rank seed data_seed full_determinism
    ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    average_tokens_across_devices"""
_LOGS = """
    output_dir overwrite_output_dir logging_dir logging_strategy logging_steps logging_first_step log_on_each_node
    logging_nan_inf_filter log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id"""
_EVALUATION = """
    eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size prediction_loss_only
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    load_best_model_at_end metric_for_best_model greater_is_better do_train do_eval do_predict"""
_CHECKPOINTS = """
    save_strategy save_steps save_total_limit save_on_each_node save_only_model save_safetensors ignore_data_skip
    restore_callback_states_from_checkpoint resume_from_checkpoint hub_token hub_private_repo hub_model_id
    hub_always_push hub_revision push_to_hub hub_strategy"""
_FREE = frozenset((_AFTER_THE_NOISE + _ON_ONE_EXAMPLE + _READING + _LOGS + _EVALUATION + _CHECKPOINTS).split())
_CHECKED = """
    max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps max_grad_norm optim bf16"""
_PLANNED = frozenset(_CHECKED.split())

_WHY = {
    "auto_find_batch_size": "a second attempt would look at the lots again; want memory=",
    "fp16": "its losses are scaled, and steps skipped, by what overflowed; want bf16=True, or neither",
    "torch_compile": "compiling hides the layers that clipping needs to see; want False",
    "use_liger_kernel": "its kernels compute losses over the lot; want False",
    "dataloader_drop_last": "every lot counts, however small; want False",
    "group_by_length": "the plan draws the lots; want False",
    "train_sampling_strategy": "the plan draws the lots; want 'random'",
    "include_num_input_tokens_seen": "how many tokens were drawn is private; want 'no'",
    "skip_memory_metrics": "the memory that lots take tells their sizes; want True",
    "fsdp": "no process would have an example's whole gradient; want one process, or several with DDP",
    "deepspeed": "it takes the gradients before they are clipped; want one process, or several with DDP",
    "torch_empty_cache_steps": "not known to this trainer; want None",
}

_OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"}


def check_arguments(args: TrainingArguments, plan: Plan) -> tuple[TrainingArguments, int | None]:
    """Return a copy of the arguments that agrees with the plan, and how many examples are in memory at a time, if said.

    Raises:
        InvalidArgument: every argument that contradicts the plan, or is not known to keep it, with the reason.
    """
    if not isinstance(args, TrainingArguments):
        raise InvalidArgument(f"args: want TrainingArguments, got {type(args).__name__}")
    standard = _make_standard(args)
    wrong = [*_check_plan(args, plan, standard), *_check_lot(args, plan, standard)]
    wrong += [_check_optimizer(args), _check_devices(args)]
    for argument in fields(args):
        name, value = argument.name, getattr(args, argument.name)
        if name not in _FREE | _PLANNED and value != getattr(standard, name, value):
            wrong.append(f"{name}={value!r}: {_WHY.get(name, 'not known to keep the plan; want its default')}")
    if reasons := [reason for reason in wrong if reason]:
        raise InvalidArgument(f"TrainingArguments: {'; '.join(reasons)}")
    own = copy.copy(args)
    own.max_steps = plan.steps
    own.max_grad_norm = 0.0  # the plan's bound is each example's own, before the noise
    own.ignore_data_skip = True  # the private run knows where it was
    own.save_only_model = True  # and keeps the optimizer and the schedule
    own.gradient_accumulation_steps = 1  # a step is a lot, in microbatches
    return own, args.per_device_train_batch_size if args.gradient_accumulation_steps > 1 else None


def _make_standard(args: TrainingArguments) -> TrainingArguments:
    """The arguments as they are where nobody gives any."""
    kind = type(args)
    try:
        return kind(output_dir=args.output_dir, use_cpu=args.use_cpu)
    except TypeError:
        return TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)


def _check_plan(args: TrainingArguments, plan: Plan, standard: TrainingArguments) -> list[str | None]:
    """Steps, epochs and bound, where they were given."""
    epochs = plan.steps / steps_per_epoch(plan)
    wrong: list[str | None] = []
    if args.max_steps > 0 and args.max_steps != plan.steps:
        wrong.append(f"max_steps={args.max_steps}: want the plan's {plan.steps}, or none")
    given = float(args.num_train_epochs)
    if args.max_steps <= 0 and given != standard.num_train_epochs and not math.isclose(given, epochs, rel_tol=0.01):
        wrong.append(f"num_train_epochs={given:g}: want the plan's {epochs:g}, or none")
    if args.max_grad_norm not in (standard.max_grad_norm, 0, 0.0, None):
        wrong.append(f"max_grad_norm={args.max_grad_norm}: the plan clips each example's gradient; want 0, or none")
    return wrong


def _check_lot(args: TrainingArguments, plan: Plan, standard: TrainingArguments) -> list[str | None]:
    """The lot as microbatches: so many for every process, so many times."""
    batch, times, processes = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    if times == 1 and batch in (standard.per_device_train_batch_size, plan.lot):
        return []
    if batch * times * processes == plan.lot:
        return []
    product = f"per_device_train_batch_size={batch} times gradient_accumulation_steps={times}"
    among = f" times {processes} processes" if processes > 1 else ""
    return [f"{product}{among}: {batch * times * processes}; want the plan's lot={plan.lot}, or neither and memory="]


def _check_optimizer(args: TrainingArguments) -> str | None:
    name = str(getattr(args.optim, "value", args.optim))
    if name in _OPTIMIZERS:
        return None
    return f"optim={name!r}: want one of {', '.join(sorted(_OPTIMIZERS))}, or optimizers=(yours, None)"


def _check_devices(args: TrainingArguments) -> str | None:
    if args.n_gpu <= 1:
        return None
    return f"n_gpu={args.n_gpu}: DataParallel sums gradients before they are clipped; want a process for each device"


# -- texts -----------------------------------------------------------------------------------------

_PADS = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": -100, "position_ids": 0}


@dataclass(frozen=True)
class TextCollator:
    """Collates examples by `collator`: without the columns that the model does not take, to a public length."""

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None
    length: int | None = None
    pad: int = 0

    @classmethod
    def from_trainer(cls, trainer: Any, length: int | None) -> TextCollator:
        """Return what collates for a trainer."""
        columns = _find_columns(trainer.model, trainer.label_names) if trainer.args.remove_unused_columns else None
        size = None if length is None else check.whole("length", length)
        return cls(trainer.data_collator, columns, size, _find_pad(trainer.model, trainer.processing_class))

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collator([self._prepare(example) for example in examples])
        return dict(batch) if isinstance(batch, Mapping) or hasattr(batch, "keys") else batch

    def _prepare(self, example: Any) -> Any:
        if not isinstance(example, Mapping):
            return example
        taken = {name: value for name, value in example.items() if self.columns is None or name in self.columns}
        return taken if self.length is None else _pad_to(self.length, taken, self.pad)


def check_collator(collator: Any) -> None:
    """Refuse a collator that pads a lot to its longest text, before anything is charged.

    Raises:
        InvalidArgument: it does.
    """
    if isinstance(collator, DataCollatorWithPadding) or hasattr(collator, "padding"):
        if getattr(collator, "padding", None) in ("max_length", False) and hasattr(collator, "max_length"):
            return
        raise InvalidArgument(
            f"data_collator={type(collator).__name__}: pads a lot to its longest text, which tells every example of "
            "another; want length=, to which each is padded by itself, or padding='max_length'"
        )


def _pad_to(length: int, example: Mapping[str, Any], pad: int) -> dict[str, Any]:
    """Return the example with every row of tokens cut or padded to a length."""
    if "input_ids" not in example:
        raise InvalidArgument(f"length: an example of {', '.join(example)}; want input_ids among them")
    padded = {"attention_mask": [1] * len(example["input_ids"])} | dict(example)
    for name, value in padded.items():
        if isinstance(value, str) or not isinstance(value, Sequence | Tensor):
            continue
        if isinstance(value, Tensor) and not value.dim():
            continue
        if name not in _PADS and name != "input_ids":
            raise InvalidArgument(f"length: nobody knows how to pad {name}; want data of one length, and no length=")
        row = list(value.tolist() if isinstance(value, Tensor) else value)[:length]
        padded[name] = row + [_PADS.get(name, pad)] * (length - len(row))
    return padded


def _find_pad(model: Any, tokenizer: Any) -> int:
    for holder in (tokenizer, getattr(model, "config", None)):
        if isinstance(token := getattr(holder, "pad_token_id", None), int):
            return token
    return 0  # which no model sees behind the attention mask


def _find_columns(model: Any, labels: Sequence[str]) -> frozenset[str]:
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    return frozenset(inspect.signature(inner.forward).parameters) | {"label", "label_ids", *labels}


__all__ = ["TextCollator", "check_arguments", "check_collator"]
