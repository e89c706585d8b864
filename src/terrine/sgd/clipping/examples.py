"""Small questions about values that hold tensors, and about torch's functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return every tensor among the values, and in lists, tuples and dicts among them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors(value)
        elif isinstance(value, dict):
            found += tensors(value.values())
    return found


def keeps_what_it_sees(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what a function of torch's writes by itself, into a table or running statistics; "" for nothing.

    Neither is written to in the call's name, so nothing else would tell.
    """
    if name in ("embedding", "embedding_bag"):
        return "max_norm changes the rows that are read" if _argument(args, kwargs, 3, "max_norm") is not None else ""
    if name not in ("batch_norm", "instance_norm") or _argument(args, kwargs, 1, "running_mean") is None:
        return ""
    is_batch = name == "batch_norm"
    learns = _argument(args, kwargs, 5, "training" if is_batch else "use_input_stats", not is_batch)
    return "running statistics are kept" if learns else ""


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, each once, by its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
