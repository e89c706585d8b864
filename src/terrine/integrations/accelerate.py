"""accelerate's `prepare` for a private run: first the plan's hooks on model and optimizer, then accelerate around them.

    model, optimizer, lots = prepare(Accelerator(), model, optimizer, dataset, plan, account)
    for x, y in lots:
        optimizer.zero_grad()
        accelerator.backward(criterion(model(x), y))
        optimizer.step()

In the other order accelerate's optimizer would stand between the step and the noise: `make_private` refuses it.
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from terrine.errors import InvalidArgument
from terrine.sgd import Plan
from terrine.sgd.private import Lots, make_private

_REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU")


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    plan: Plan,
    account: Charged | None = None,
    **others: Any,
) -> tuple[nn.Module, Optimizer, Lots]:
    """`make_private`, then `accelerator.prepare`; `others` are those of `make_private`.

    Raises:
        InvalidArgument: the accelerator would accumulate, scale, compile or shard what the plan has to clip.
    """
    check_accelerator(accelerator)
    others.setdefault("device", accelerator.device)
    model, optimizer, lots = make_private(model, optimizer, dataset, plan, account, **others)
    model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False  # the clipped sums are added up after clipping, by the step
    return model, optimizer, lots


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse an accelerator that stands between a lot and its step, as by arguments or `accelerate launch`.

    Raises:
        InvalidArgument: it accumulates, scales, compiles or shards.
    """
    found = []
    if accelerator.gradient_accumulation_steps != 1:
        steps = accelerator.gradient_accumulation_steps
        found.append(f"gradient_accumulation_steps={steps}: a step is the plan's lot; want 1, and piece= or memory=")
    if accelerator.mixed_precision != "no":
        found.append(f"mixed_precision={accelerator.mixed_precision!r}: want 'no'")
    kind = DistributedType(accelerator.distributed_type).value
    if kind not in _REPLICATED:
        found.append(f"distributed_type={kind}: it shards or moves gradients before they are clipped; want DDP")
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is not None and getattr(plugin.backend, "value", "NO") != "NO":
        found.append(f"dynamo_backend={plugin.backend.value}: compiling hides layers that clipping needs; want 'no'")
    if found:
        raise InvalidArgument(f"Accelerator: {'; '.join(found)}")


__all__ = ["check_accelerator", "prepare"]
