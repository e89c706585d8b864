"""Lots: a tensor, or a tuple or dict of tensors, whose first dimension counts the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

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
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors((lot,))}
    if not sizes:
        raise InvalidArgument(f"a lot of type {type(lot).__name__}: want tensors whose first dimension counts examples")
    return int(sizes.pop()) if len(sizes) == 1 else -1


def check_rows(x: Lot, size: int) -> None:
    """Refuse a lot of which not every tensor has a row for each of `size` examples.

    Raises: InvalidArgument
    """
    shapes = [tuple(leaf.shape) for leaf in tensors((x,))]
    if any(not shape or shape[0] != size for shape in shapes):
        raise InvalidArgument(
            f"x of shapes {shapes} for {size} examples: want a first dimension that counts examples in every tensor; "
            "what all examples share belongs into the model, as a buffer"
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


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Every tensor among the values, and in lists, tuples and dicts among them."""
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
    """What a function of torch's writes by itself, into a table or running statistics that it is given; "" for nothing.

    Neither is written to in the call's name, so nothing else would tell.
    """
    if name in ("embedding", "embedding_bag"):
        return "max_norm changes the rows that are read" if _given(args, kwargs, 3, "max_norm") is not None else ""
    if name not in ("batch_norm", "instance_norm") or _given(args, kwargs, 1, "running_mean") is None:
        return ""
    is_batch = name == "batch_norm"
    learns = _given(args, kwargs, 5, "training" if is_batch else "use_input_stats", not is_batch)
    return "running statistics are kept" if learns else ""


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each once, by its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
