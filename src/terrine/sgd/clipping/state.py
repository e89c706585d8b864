"""What a model keeps beside its trained weights: numbers, flags, lists and arrays in attributes, and its buffers.

Every microbatch of a lot begins with the same, so what an example does cannot reach those that run after it in the lot;
what is unconditional, such as a counter, goes on from lot to lot. A forward pass in which Python has read something of
an example (`item()`, `if`, a shape that depends on values) may change nothing: it could keep what it read.

Seen are the attributes of all modules, and writes into the memory of their parameters, buffers and other tensors, by
any view of it. Global variables and objects of other classes are not (docs/pitfalls.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.examples import tensors


class _Attribute(NamedTuple):
    """What a module's attribute was: the object, and a copy of what it held."""

    value: Any
    held: Any


class ModuleState:
    """The state of these modules when a lot begins, or a further forward pass of it."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._before = [(module, _attributes(module)) for module in modules]
        self._memory: dict[int, list[Tensor]] = {}  # tensors that outlive a forward pass, by where their numbers lie
        for module in modules:
            for tensor in tensors(value for name, value in vars(module).items() if name != "_modules"):
                self._memory.setdefault(_place(tensor), []).append(tensor)
        self._written: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._versions = self._versions_now()

    def about_to_write(self, targets: Iterable[Any]) -> None:
        """Keep what is in the memory of these tensors, where it outlives the forward pass."""
        for target in tensors(targets):
            place = _place(target)
            if place in self._memory and place not in self._written:
                self._written[place] = [(one, one.detach().clone()) for one in self._memory[place]]

    def restore(self) -> None:
        """Put everything back as it was when the lot began."""
        for module, before in self._before:
            for name in _changed(module, before):
                if name in before:
                    vars(module)[name] = _restored(before[name])
                else:
                    del vars(module)[name]
        with torch.no_grad():
            for copies in self._written.values():
                for tensor, copy in copies:
                    tensor.data.copy_(copy)
        self._versions = self._versions_now()

    def check(self, asked: bool) -> None:
        """Refuse a forward pass that keeps what an example said; `asked`: whether Python read something of one.

        Raises: InvalidArgument
        """
        if self._unseen():
            raise InvalidArgument(
                "the model's forward pass changes a parameter or a buffer in a way that is not followed, so examples "
                "could meet over time; want a forward pass that leaves them alone"
            )
        if asked and (changed := self._changed_now()):
            self.restore()
            raise InvalidArgument(
                f"{changed} is changed in a forward pass that reads numbers of its examples (item(), if), so those of "
                "an earlier lot could meet later ones; want none kept"
            )

    def _changed_now(self) -> str:
        for module, before in self._before:
            if _changed(module, before):
                return f"{type(module).__name__}: an attribute"
        for copies in self._written.values():
            if any(not torch.equal(tensor.detach(), copy) for tensor, copy in copies):
                return "a parameter or a buffer"
        return ""

    def _unseen(self) -> bool:
        now = self._versions_now()
        return any(now[place] != self._versions[place] and place not in self._written for place in now)

    def _versions_now(self) -> dict[int, int]:
        return {place: sum(one._version for one in some) for place, some in self._memory.items()}


def _attributes(module: nn.Module) -> dict[str, _Attribute]:
    """A module's own attributes that can hold something, parameters and buffers among them."""
    found = {
        name: _Attribute(value, _copied(value))
        for name, value in vars(module).items()
        if (type(value) in _KEPT and name not in _OWN) or name == "training"
    }
    for kind in ("_parameters", "_buffers"):
        found[kind] = _Attribute(vars(module)[kind], dict(vars(module)[kind]))
    return found


def _changed(module: nn.Module, before: dict[str, _Attribute]) -> list[str]:
    """The attributes that hold something else now, are new, or are gone."""
    now = _attributes(module)
    gone = before.keys() ^ now.keys()
    return [*gone, *(name for name in before.keys() & now.keys() if not _same(before[name].held, now[name].held))]


def _copied(value: Any) -> Any:
    """The same with containers of its own; anything else is the same object."""
    if type(value) is np.ndarray:
        return value.copy()
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in _CONTAINERS else value


def _restored(attribute: _Attribute) -> Any:
    value, held = attribute.value, _copied(attribute.held)
    if isinstance(value, dict | set):
        value.clear()
        value.update(held)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(held)
    elif isinstance(value, np.ndarray):
        value[...] = held
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes hold the same: numbers and texts that are equal, and else the same objects."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) in _KEPT and one == other


def _place(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a tensor under vmap, or one without memory: no module's
        return 0


_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_KEPT = (*_PLAIN, *_CONTAINERS, dict, np.ndarray)
_OWN = frozenset(vars(nn.Module()))  # what every module has
