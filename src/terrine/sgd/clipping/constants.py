"""Constants that a model makes as it goes, such as the first state of a recurrence: `torch.zeros(len(x), width)`.

Nothing in such a tensor tells whether a dimension as long as the lot counts examples or happens to be as long. The
first lot's trial runs the model on several examples and on one: a dimension that goes from their number to 1, in the
same call of the same function, counts them. A pass that makes other constants than those is not told anything.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MAKES = frozenset({"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"})
"""Functions whose results hold nothing of any example: all rows are the same."""


class Constant(NamedTuple):
    """A call: its function's name, the shape of what it made, and which dimension of that counts examples, if any."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None

    def is_like(self, name: str, shape: tuple[int, ...], examples: int) -> bool:
        """Whether a call in a pass over so many examples can be this one."""
        wanted = list(self.shape)
        if self.axis is not None:
            wanted[self.axis] = examples
        return name == self.name and shape == tuple(wanted)


class Noted(TorchFunctionMode):
    """Notes every constant that is made within."""

    def __init__(self) -> None:
        self.made: list[Constant] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in MAKES and isinstance(result, Tensor):
            self.made.append(Constant(func.__name__, tuple(result.shape)))
        return result


def told_apart(company: Sequence[Constant], alone: Sequence[Constant], many: int) -> tuple[Constant, ...]:
    """The constants of a pass over `many` examples, beside those of one over one of them, as far as both agree."""
    found = []
    for one, other in itertools.zip_longest(company, alone):
        if one is None or other is None or one.name != other.name or len(one.shape) != len(other.shape):
            break
        changed = [axis for axis, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if sizes[0] != sizes[1]]
        if len(changed) > 1 or any((one.shape[axis], other.shape[axis]) != (many, 1) for axis in changed):
            break
        found.append(one._replace(axis=changed[0] if changed else None))
    return tuple(found)


def keep(model: nn.Module, found: tuple[Constant, ...]) -> None:
    """Remember what a model makes, in its present mode."""
    _known.setdefault(model, {})[model.training] = found


def of(model: nn.Module) -> tuple[Constant, ...]:
    """What a model is known to make, in its present mode."""
    return _known.get(model, {}).get(model.training, ())


_known: weakref.WeakKeyDictionary[nn.Module, dict[bool, tuple[Constant, ...]]] = weakref.WeakKeyDictionary()
