"""accelerate's `prepare` for a private run: the steps of a plan, and model and optimizer as accelerate wants them.

    model, optimizer, steps = prepare(Accelerator(), model, optimizer, dataset, plan, loss=loss, account=account)
    for step in steps:                 # the noisy gradient is in .grad
        optimizer.step()

With `mixed_precision="bf16"` the loss runs under autocast; norms, clipping and sums stay in single precision.
"""

from __future__ import annotations

from typing import Any

from terrine.errors import MissingExtra
from terrine.receipts import Charged

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise MissingExtra("accelerate", extra="huggingface") from error

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from terrine.errors import InvalidArgument
from terrine.sgd import Plan, PrivateSteps, private_steps
from terrine.sgd.loss import Loss

_REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU")
_PRECISIONS = {"no": None, "bf16": "bf16"}


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    loss: Loss,
    account: Charged | None = None,
    **others: Any,
) -> tuple[nn.Module, Optimizer, PrivateSteps]:
    """Return model and optimizer as `accelerator.prepare` does, and the steps of `private_steps`.

    Args:
        accelerator: Decides device, processes and precision.
        model: The module to train, in training mode.
        optimizer: Of the model's trained parameters. The loop steps the one that is returned.
        dataset: The whole of it, in every process.
        plan: Decides lots, clipping, noise and how many steps there are.
        loss: A function of (model, batch) of one example, or a criterion.
        account: Charged for the whole plan before the first step.
        others: Further arguments of `private_steps`.

    Raises:
        InvalidArgument: The accelerator would accumulate, scale, compile or shard; or as `private_steps`.
        BudgetExceeded: The account does not have the plan's cost left.
    """
    others.setdefault("precision", find_precision(accelerator))
    others.setdefault("device", accelerator.device)
    steps = private_steps(model, optimizer, dataset, plan, loss=loss, account=account, **others)
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    return prepared_model, prepared_optimizer, steps


def find_precision(accelerator: Accelerator) -> str | None:
    """Return the precision that the loss runs in, None for that of its tensors.

    Raises:
        InvalidArgument: the accelerator, as by arguments or `accelerate launch`, accumulates, scales, compiles or
            shards.
    """
    wrong, precision = [], accelerator.mixed_precision
    if accelerator.gradient_accumulation_steps != 1:
        count = accelerator.gradient_accumulation_steps
        wrong.append(
            f"gradient_accumulation_steps={count}: a step is the plan's lot; want 1, and microbatch= or memory="
        )
    if precision not in _PRECISIONS:
        wrong.append(
            f"mixed_precision={precision!r}: its losses are scaled, and steps skipped, by what overflowed; want 'bf16' "
            "or 'no'"
        )
    kind = DistributedType(accelerator.distributed_type).value
    if kind not in _REPLICATED:
        wrong.append(f"distributed_type={kind}: it shards or moves gradients before they are clipped; want DDP")
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is not None and getattr(plugin.backend, "value", "NO") != "NO":
        wrong.append(f"dynamo_backend={plugin.backend.value}: compiling hides layers that clipping needs; want 'no'")
    if wrong:
        raise InvalidArgument(f"Accelerator: {'; '.join(wrong)}")
    return _PRECISIONS[precision]


__all__ = ["find_precision", "prepare"]
