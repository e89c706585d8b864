"""Models whose parameters lie in parts in several processes: `torch.distributed.fsdp.fully_shard` (FSDP2).

Between steps every process has its part of the parameters, of the noisy gradient and of the optimizer's state. In a
step the model is gathered: its parameters are whole and plain, so that an example's whole gradient can be clipped; the
wrappers' hooks, which would gather and scatter by themselves, are set aside meanwhile. The clipped sums of all
processes are added up, the noise of the one key comes on top, and every process keeps its part:

    gather(model):  clip and add up  ->  sum over processes + noise  ->  take_part(...) into .grad

So parameters and one sum of their size have to fit for the length of a step; the optimizer's state never has to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument


def is_part(tensor: Any) -> bool:
    """Whether other processes hold other parts of it: a DTensor, which lies on a mesh of devices."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def is_sharded(model: nn.Module) -> bool:
    """Whether processes have parts of the model's parameters."""
    return any(is_part(parameter) for parameter in model.parameters())


@contextmanager
def gather(model: nn.Module) -> Iterator[None]:
    """Have whole, plain parameters inside, by every process; parts again after it.

    Raises: InvalidArgument where a parameter is sharded by something else than `fully_shard`, or changed by it.
    """
    if not is_sharded(model):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [(held, dict(held)) for module in wrapped for held in _hooks(module)]
    parts = {name: (parameter.dtype, parameter.device.type) for name, parameter in model.named_parameters()}
    try:
        for module in wrapped:
            module.unshard()
        _check_gathered(model, parts)
        for held, before in hooks:
            for key, hook in before.items():
                if _is_of_fsdp(hook):
                    del held[key]
        yield
    finally:
        for held, before in hooks:
            held.clear()
            held.update(before)
        for module in wrapped:
            module.reshard()


def take_part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process' part of `whole`, which every process has, as `like` is cut; all of it where it is not."""
    if not is_part(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    copies = DTensor.from_local(whole.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = copies.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return part


def join_parts(state: Any, *, keep: bool) -> Any:
    """Return a state whose tensors are whole, on the CPU where they were parts; by every process, for those that keep.

    The others get None for every tensor that was in parts.
    """

    def join(leaf: Any) -> Any:
        if not is_part(leaf):
            return leaf
        whole = leaf.full_tensor()
        return whole.cpu() if keep else None

    return pytree.tree_map(join, state)


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state whose tensors are whole."""
    own = model.state_dict()
    model.load_state_dict({name: _part_of(value, own.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state whose tensors are whole."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = {
        index: {name: _part_of(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": parts})


def _check_gathered(model: nn.Module, parts: Mapping[str, tuple[Any, str]]) -> None:
    for name, parameter in model.named_parameters():
        if is_part(parameter):
            raise InvalidArgument(
                f"{name}: sharded, but not by torch.distributed.fsdp.fully_shard alone; want that for every sharded "
                "parameter, and no tensor parallelism"
            )
        if (parameter.dtype, parameter.device.type) != parts[name]:
            was, now = " on ".join(map(str, parts[name])), f"{parameter.dtype} on {parameter.device.type}"
            raise InvalidArgument(
                f"{name}: {was}, gathered as {now}; want fully_shard without mp_policy= and offload_policy=, and "
                "precision='bf16' here"
            )


def _part_of(value: Any, like: Any) -> Any:
    is_cut = is_part(like) and isinstance(value, Tensor) and value.shape == like.shape
    return take_part(value, like) if is_cut else value


def _hooks(module: nn.Module) -> list[Any]:
    return [module._forward_pre_hooks, module._forward_hooks]


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


__all__ = ["gather", "is_part", "is_sharded", "join_parts", "load_model", "load_optimizer", "take_part"]
