"""`TrainingArguments` under a plan: each is free, settled by the plan, or refused by name.

Every argument that this file does not know must have its default: an argument of a later version is refused until
somebody has looked at what it does to examples, gradients and logs.
"""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

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
    hub_always_push hub_revision"""
_FREE = frozenset((_AFTER_THE_NOISE + _ON_ONE_EXAMPLE + _READING + _LOGS + _EVALUATION + _CHECKPOINTS).split())
_CHECKED = "max_steps num_train_epochs per_device_train_batch_size max_grad_norm optim push_to_hub hub_strategy"
_PLANNED = frozenset(_CHECKED.split())

_WHY = {
    "gradient_accumulation_steps": "a step is the plan's lot, taken in microbatches that fit; want 1, and memory=",
    "auto_find_batch_size": "a second attempt would look at the lots again; want memory=",
    "fp16": "a loss scaled by what overflowed tells of it; want float32",
    "bf16": "autocast is not known to keep norms exact; want float32",
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


def settled(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """A copy of the arguments that agrees with the plan.

    Raises:
        InvalidArgument: every argument that contradicts the plan, or is not known to keep it, with the reason.
    """
    if not isinstance(args, TrainingArguments):
        raise InvalidArgument(f"args: want TrainingArguments, got {type(args).__name__}")
    standard = _standard(args)
    wrong = [_check_optimizer(args), _check_devices(args), _check_hub(args), *_check_plan(args, plan, standard)]
    for one in fields(args):
        value = getattr(args, one.name)
        if one.name not in _FREE | _PLANNED and value != getattr(standard, one.name, value):
            wrong.append(f"{one.name}={value!r}: {_WHY.get(one.name, 'not known to keep the plan; want its default')}")
    if found := [one for one in wrong if one]:
        raise InvalidArgument(f"TrainingArguments: {'; '.join(found)}")
    own = copy.copy(args)
    own.max_steps = plan.steps
    own.max_grad_norm = 0.0  # the plan's bound is each example's own, before the noise
    own.ignore_data_skip = True  # the private run knows where it was
    own.save_only_model = True  # and keeps the optimizer and the schedule
    return own


def _standard(args: TrainingArguments) -> TrainingArguments:
    """The arguments as they are where nobody gives any."""
    kind = type(args)
    try:
        return kind(output_dir=args.output_dir, use_cpu=args.use_cpu)
    except TypeError:
        return TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)


def _check_plan(args: TrainingArguments, plan: Plan, standard: TrainingArguments) -> list[str | None]:
    """Steps, epochs, lot and bound, where they were given."""
    epochs = plan.steps / steps_per_epoch(plan)
    wrong: list[str | None] = []
    if args.max_steps > 0 and args.max_steps != plan.steps:
        wrong.append(f"max_steps={args.max_steps}: want the plan's {plan.steps}, or none")
    given = float(args.num_train_epochs)
    if args.max_steps <= 0 and given != standard.num_train_epochs and not math.isclose(given, epochs, rel_tol=0.01):
        wrong.append(f"num_train_epochs={given:g}: want the plan's {epochs:g}, or none")
    batch = args.per_device_train_batch_size
    if batch not in (standard.per_device_train_batch_size, plan.lot):
        wrong.append(f"per_device_train_batch_size={batch}: want the plan's lot={plan.lot}, or none; and memory=")
    if args.max_grad_norm not in (standard.max_grad_norm, 0, 0.0, None):
        wrong.append(f"max_grad_norm={args.max_grad_norm}: the plan clips each example's gradient; want 0, or none")
    return wrong


def _check_optimizer(args: TrainingArguments) -> str | None:
    name = str(getattr(args.optim, "value", args.optim))
    if name in _OPTIMIZERS:
        return None
    return f"optim={name!r}: want one of {', '.join(sorted(_OPTIMIZERS))}, or optimizers=(yours, None)"


def _check_devices(args: TrainingArguments) -> str | None:
    if args.n_gpu <= 1:
        return None
    return f"n_gpu={args.n_gpu}: DataParallel sums gradients before they are clipped; want a process for each device"


def _check_hub(args: TrainingArguments) -> str | None:
    strategy: Any = getattr(args.hub_strategy, "value", args.hub_strategy)
    if not args.push_to_hub or strategy == "end":
        return None
    return f"hub_strategy={strategy!r}: an unfinished run's folder holds the key of its noise; want 'end'"


__all__ = ["settled"]
