"""Lots: a tensor, or a tuple or dict of tensors, whose first dimension counts the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument

Criterion = Callable[[Any, Any], Tensor]
Lot = Any


_unwatched: ContextVar[bool] = ContextVar("unwatched", default=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """What is computed inside is nothing that a recorder on the model should see."""
    token = _unwatched.set(True)
    try:
        yield
    finally:
        _unwatched.reset(token)


def is_unwatched() -> bool:
    """Whether recorders are to let a forward pass go by."""
    return _unwatched.get()


def call(model: nn.Module, x: Lot) -> Any:
    """`model` on a lot: a tuple is positional arguments, a dict is keyword arguments."""
    args, kwargs = arguments(x)
    return model(*args, **kwargs)


def arguments(x: Lot) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A lot as positional and keyword arguments."""
    if isinstance(x, tuple | list):
        return tuple(x), {}
    return ((), x) if isinstance(x, dict) else ((x,), {})


def count(lot: Lot) -> int:
    """How many examples a lot holds; -1 where its tensors disagree."""
    if isinstance(lot, Tensor) and lot.dim():
        return int(lot.shape[0])
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors(lot)}
    if not sizes:
        raise InvalidArgument(f"a lot of type {type(lot).__name__}: want tensors whose first dimension counts examples")
    return int(sizes.pop()) if len(sizes) == 1 else -1


def check_rows(x: Lot, size: int) -> None:
    """Refuse a lot of which not every tensor has a row for each of `size` examples.

    Raises: InvalidArgument
    """
    shapes = [tuple(leaf.shape) for leaf in tensors(x)]
    if any(not shape or shape[0] != size for shape in shapes):
        raise InvalidArgument(
            f"x of shapes {shapes} for {size} examples: want a first dimension that counts examples in every tensor (bags "
            "as rows of a matrix, not between offsets); what all examples share belongs into the model, as a buffer"
        )


def bags(x: Lot, size: int) -> list[int]:
    """The lengths of `size` bags of tokens between offsets, as EmbeddingBag takes them; empty for any other lot."""
    if not isinstance(x, tuple | list) or len(x) != 2 or not all(isinstance(one, Tensor) for one in x):
        return []
    tokens, offsets = x
    whole = all(one.dim() == 1 and not one.is_floating_point() for one in x)
    if not whole or len(offsets) != size or len(tokens) == size or not size:
        return []
    stops = [*offsets.tolist()[1:], len(tokens)]
    return [stop - start for start, stop in zip(offsets.tolist(), stops, strict=True)]


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a lot, in arguments or in an output, however they are nested."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) not in (tuple, list, dict):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    found = []
    for one in value.values() if type(value) is dict else value:  # what pytree does, several times as fast
        if isinstance(one, Tensor):
            found.append(one)
        elif one is not None:
            found += tensors(one)
    return found


def part(lot: Lot, start: int, stop: int) -> Lot:
    """The examples `start` to `stop` of a lot."""
    if isinstance(lot, Tensor):
        return lot[start:stop]
    return pytree.tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, lot)


def detached(lot: Lot) -> Lot:
    """The same lot without a history: the backward pass ends at it."""
    if isinstance(lot, Tensor):
        return lot.detach() if lot.requires_grad else lot
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, lot)


def chunks(size: int, per_chunk: int) -> Iterator[tuple[int, int]]:
    """The bounds of consecutive parts of at most `per_chunk` of `size` examples."""
    return ((start, min(start + per_chunk, size)) for start in range(0, size, per_chunk))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once, by its first name."""
    kind = type(model)
    if kind.named_parameters is not nn.Module.named_parameters or kind.named_modules is not nn.Module.named_modules:
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, nn.Parameter] = {}
    _collect(model, "", found, set())
    return found


def _collect(module: nn.Module, prefix: str, found: dict[str, nn.Parameter], seen: set[int]) -> None:
    """What `named_parameters` does, in its order and with its names, several times as fast: a step asks every time."""
    seen.add(id(module))
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            found[prefix + name] = parameter
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            _collect(child, f"{prefix}{name}.", found, seen)
