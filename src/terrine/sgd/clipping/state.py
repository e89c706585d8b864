"""What a model keeps beside its trained weights: numbers, flags, lists and arrays in attributes, and its buffers.

Every microbatch of a lot begins with the same, so what an example does cannot reach those that run after it in the lot;
what is unconditional, such as a counter, goes on from lot to lot. A forward pass in which Python has read something of
an example (`item()`, `if`, an error that its values raise) may change nothing: it could keep what it read.

Attributes are compared with what they were when the lot began, containers by what they hold and anything else by which
object it is; the numbers of parameters, buffers and other tensors with what they were before the first reading, however
they are written. Objects of other classes are not seen into, nor are global variables (docs/pitfalls.md).
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.examples import tensors


class ModuleState:
    """The state of these modules when a lot begins, or a further forward pass of it."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self.modules = list(modules)
        self._attributes = [_Contents.of(vars(module)) for module in modules]
        self._tensors = list({id(one): one for module in modules for one in held_by(module)}.values())
        self._places: dict[int, list[Tensor]] = {}
        for tensor in self._tensors:
            self._places.setdefault(_place(tensor), []).append(tensor)
        self._written: dict[int, _Numbers] = {}  # by tensor: what was written to in this lot
        self._read: list[_Numbers] | None = None  # everything as it was when an example was first read
        self._is_restored = True  # all numbers are as they were when the lot began, and as they were read
        self._versions = self._versions_now()

    def holds(self, tensor: Any) -> bool:
        """Whether it is a parameter, a buffer, or another tensor of the modules'."""
        return any(tensor is one for one in self._tensors)

    def about_to_write(self, targets: Iterable[Any]) -> None:
        """Keep the numbers that these tensors share with any that outlives the forward pass."""
        for target in tensors(targets):
            for one in self._places.get(_place(target), ()):
                self._written.setdefault(id(one), _Numbers.of(one))
                self._is_restored = False

    def about_to_read(self) -> None:
        """Keep all numbers: Python is about to learn something of an example."""
        if self._read is None:
            self._read = [_Numbers.of(one) for one in self._tensors]
        self._is_restored = False

    def restore(self) -> None:
        """Put everything back as it was when the lot began."""
        for contents in self._attributes:
            contents.restore()
        if not self._is_restored:
            for numbers in (*(self._read or ()), *self._written.values()):
                numbers.restore()
            self._read, self._versions, self._is_restored = None, self._versions_now(), True

    def check(self, asked: bool) -> None:
        """Refuse a forward pass that keeps what an example said; `asked`: whether Python read something of one.

        Raises: InvalidArgument
        """
        changed = self._changed() if asked else self._changed_unseen()
        self._is_restored = asked and not changed and not self._written
        if changed:
            self.restore()
            raise InvalidArgument(
                f"{changed} in a forward pass that may read numbers of its examples (item(), if, an error), so those "
                "of an earlier lot could meet later ones; want none kept"
            )

    def _changed(self) -> str:
        for module, contents in zip(self.modules, self._attributes, strict=True):
            if not contents.is_same():
                return f"{type(module).__name__}: an attribute is changed"
        same = all(one.is_same() for one in self._read or self._written.values())
        return "" if same else "a parameter or a buffer is changed"

    def _changed_unseen(self) -> str:
        now = self._versions_now()
        unseen = any(version != self._versions[key] and key not in self._written for key, version in now.items())
        return "a parameter or a buffer is changed by a function that is not followed" if unseen else ""

    def _versions_now(self) -> dict[int, int]:
        return {id(one): one._version for one in self._tensors}


def held_by(module: nn.Module) -> list[Tensor]:
    """The tensors that a module holds itself, in containers too: parameters, buffers, and any other."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left: list[Any] = [vars(module)]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            found += [] if value.is_meta or value.is_nested else [value]
        elif isinstance(value, dict | list | tuple | set | deque) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return found


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever the modules keep inside, outside they have not."""
    state = ModuleState(modules)
    state.about_to_read()
    try:
        yield
    finally:
        state.restore()


class _Numbers(NamedTuple):
    """A tensor, the memory that it had, and a copy of its numbers."""

    tensor: Tensor
    memory: Tensor
    copy: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Numbers:
        return cls(tensor, tensor.data, tensor.detach().clone())

    def is_same(self) -> bool:
        """Whether the tensor has its memory, and that its numbers."""
        now = self.tensor.detach()
        if (
            now.device != self.copy.device
            or _place(now) != _place(self.memory)
            or now.shape != self.copy.shape
            or now.dtype != self.copy.dtype
        ):
            return False
        if now.layout is not torch.strided:
            return torch.equal(now.to_dense(), self.copy.to_dense())
        return bool(torch.equal(now, self.copy)) or bool(
            torch.equal(now.isnan(), self.copy.isnan()) and torch.equal(now.nan_to_num(), self.copy.nan_to_num())
        )

    def restore(self) -> None:
        """Give the tensor its memory and its numbers back."""
        if not self.is_same():
            self.tensor.data = self.memory
            with torch.no_grad():
                self.memory.copy_(self.copy)


class _Contents:
    """A container, what was in it, and the containers among that."""

    def __init__(self, value: Any, items: Any, inner: list[_Contents]) -> None:
        self._value, self._items, self._inner = value, items, inner

    @classmethod
    def of(cls, value: Any, seen: set[int] | None = None) -> _Contents:
        """The contents of a container, and of those in it that were not seen before."""
        seen = set() if seen is None else seen
        seen.add(id(value))
        if isinstance(value, np.ndarray | bytearray | array):
            return cls(value, value.copy() if isinstance(value, np.ndarray) else value[:], [])
        if isinstance(value, dict):
            items: Any = dict(value)
            members: Iterable[Any] = items.values()
        else:
            items = members = list(value)
        inner = []
        for one in members:
            if isinstance(one, _CONTAINERS) and id(one) not in seen:
                inner.append(cls.of(one, seen))
        return cls(value, items, inner)

    def is_same(self) -> bool:
        """Whether everything is there that was."""
        return self._holds_the_same() and all(one.is_same() for one in self._inner)

    def restore(self) -> None:
        """Put the same objects back, in the same order, into the same containers."""
        value, items = self._value, self._items
        if not self._holds_the_same():
            if isinstance(value, np.ndarray):
                value[...] = items
            elif isinstance(value, bytearray | array):
                value[:] = items
            elif isinstance(value, dict | set):
                value.clear()
                value.update(items)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(items)
        for one in self._inner:
            one.restore()

    def _holds_the_same(self) -> bool:
        value, items = self._value, self._items
        if isinstance(value, np.ndarray):
            return bool(value.shape == items.shape and value.tobytes() == items.tobytes())
        if isinstance(value, bytearray | array):
            return bool(value == items)
        if len(value) != len(items):
            return False
        if isinstance(value, set | frozenset):
            return value == set(items)
        if isinstance(value, dict):
            now, before = value.values(), items.values()
            if not all(map(operator.is_, value, items)):
                return False
        else:
            now, before = value, items
        return all(map(operator.is_, now, before)) or all(map(_same, now, before))


def _same(one: Any, other: Any) -> bool:
    """The same object, or an equal number, text or tensor, or a container of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, Tensor):
        return _Numbers(one, one, other).is_same()
    return isinstance(one, _PLAIN) and (bool(one == other) or (one != one and other != other))


def _place(tensor: Tensor) -> int:
    """Which memory a tensor is in: one and the same for its views; 0 for one under vmap, or without any."""
    try:
        return id(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return 0


_PLAIN = (int, float, complex, str, bytes, np.generic, slice, range, set, frozenset, PurePath, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, np.ndarray, bytearray, array)
