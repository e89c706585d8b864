"""What a program may not carry from one example to the next: the Python state that a model and a loss can reach.

    modules, functions (defaults, closures, the globals they name), methods' objects, instances and classes of the
    caller's own, containers, arrays, generators of random numbers

`Reachable(...)` notes what is there; after a batch, `changed()` names the first thing that is different. Tensors that a
program writes to are put back by the recording, and parameters change between batches; here they count by identity,
small ones by their numbers too. What is not seen: compiled code, files, other modules' globals (docs/pitfalls.md).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import types
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_FOREIGN: tuple[str, ...] = ("torch", "numpy", "scipy", "sklearn", "terrine", "transformers", "peft", "timm")
_FOREIGN += ("lightning", "accelerate", "rich", "builtins", "functools", "typing", "collections", "logging", "abc")
_FOREIGN += ("enum", "dataclasses", "torchmetrics")
"""Packages into whose functions and classes nobody looks; their objects' attributes are seen all the same."""
_BOOKKEEPING = ("terrine.sgd.steps", "terrine.sgd.release", "terrine.sgd.clipping.clipper")
"""Modules of the run itself, which its optimizer's hooks lead to and which goes on while examples run."""
_PLAIN = str | bytes | int | float | complex | None | torch.dtype | torch.device | torch.Size | slice | range
_SMALL = 4096  # numbers of a tensor that are compared
_MOST = 200_000  # entries that are looked at

Path = tuple[Any, ...]


class Reachable:
    """What can be reached from some roots, by name, and what each thing was when this was made."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
        self._before = dict(_walk(self._roots))

    def changed(self) -> str:
        """The name of something that is not what it was; empty where all is."""
        now = dict(_walk(self._roots))
        if now == self._before:
            return ""
        for path in (*self._before, *now):
            if self._before.get(path) != now.get(path):
                return "".join(map(str, path))
        return ""


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every reachable thing once, as (path, what it is)."""
    waiting: deque[tuple[Path, Any]] = deque(((name,), value) for name, value in roots.items())
    seen: dict[int, Any] = {}  # by id; holds what it names, so that no id is used twice
    while waiting and len(seen) < _MOST:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            yield path, (type(value), repr(value))
            continue
        if id(value) in seen:
            yield path, id(value)
            continue
        seen[id(value)] = value
        content, members = _describe(value)
        yield path, (id(value) if content is None else content)
        waiting.extend(((*path, step), member) for step, member in members)


def _describe(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """What a thing is, None where that is its identity, and what it holds."""
    if isinstance(value, Tensor):
        return _describe_tensor(value), []
    if isinstance(value, np.ndarray | np.generic | bytearray | array):
        content = np.asarray(value)
        return (id(value) if isinstance(value, np.ndarray) else 0, content.shape, _digest(content.tobytes())), []
    if isinstance(value, torch.Generator):
        return (id(value), _digest(value.get_state().numpy().tobytes())), []
    if isinstance(value, np.random.Generator):
        return (id(value), repr(value.bit_generator.state)), []
    if isinstance(value, np.random.RandomState):
        return (id(value), repr(value.get_state())), []
    if isinstance(value, random.Random):
        return (id(value), hash(value.getstate())), []
    if isinstance(value, dict):
        return (id(value), len(value)), [
            (f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{type(key).__name__} {index}]", member)
            for index, (key, member) in enumerate(value.items())
        ]
    if isinstance(value, list | tuple | deque):
        own = None if isinstance(value, tuple) else id(value)
        return (own, len(value)), [(f"[{index}]", member) for index, member in enumerate(value)]
    if isinstance(value, set | frozenset):
        return (len(value), sorted(map(repr, value)) if len(value) < _SMALL else 0), []
    if isinstance(value, types.ModuleType | types.CodeType | types.BuiltinFunctionType | property):
        return None, []
    if type(value).__module__ in _BOOKKEEPING:
        return None, []
    if isinstance(value, functools.partial):
        return None, [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if callable(getattr(value, "cache_info", None)):
        return (id(value), repr(value.cache_info())), []
    if isinstance(value, types.MethodType):
        return (id(value.__func__), id(value.__self__)), [("", value.__func__), (".self", value.__self__)]
    if isinstance(value, types.FunctionType):
        return None, _function_members(value)
    if isinstance(value, staticmethod | classmethod):
        return None, [("", value.__func__)]
    if isinstance(value, type):
        return None, [] if _is_foreign(value) else _class_members(value)
    return _iterator_state(value), _object_members(value)


def _describe_tensor(tensor: Tensor) -> Any:
    identity = (id(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested
    if isinstance(tensor, nn.Parameter) or not plain or tensor.numel() > _SMALL:
        return identity
    try:
        numbers = tensor.detach().cpu().contiguous().flatten()
    except RuntimeError:  # it was kept from inside vmap, and holds nothing any more
        return identity
    return (*identity, _digest(numbers.view(torch.uint8).numpy().tobytes()))


def _iterator_state(value: Any) -> Any:
    """How far an iterator is, where that can be told."""
    if inspect.isgenerator(value):
        return id(value), getattr(value.gi_frame, "f_lasti", None)
    return (id(value), repr(value)) if type(value).__module__ == "itertools" and "count" in repr(value) else None


def _function_members(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function keeps, and the globals of its module that it names."""
    members: list[tuple[str, Any]] = [(".defaults", function.__defaults__), (".kwdefaults", function.__kwdefaults__)]
    members += [(f".{name}", kept) for name, kept in vars(function).items()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            members.append((f":{name}", cell.cell_contents))
        except ValueError:  # a name that is not bound yet
            members.append((f":{name}", None))
    if not _is_foreign(function):
        known = function.__globals__
        members += [(f":{name}", known[name]) for name in sorted(_names(function.__code__)) if name in known]
    return members


def _names(code: types.CodeType) -> set[str]:
    """The names in a function's code, and in those of functions within it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _class_members(kind: type) -> list[tuple[str, Any]]:
    hidden = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__static_attributes__"}
    members = [(f".{name}", kept) for name, kept in vars(kind).items() if name not in hidden]
    return members + [(".base", base) for base in kind.__bases__ if not _is_foreign(base)]


def _object_members(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, nn.Module) and str(type(value).__module__).startswith("torch.distributed."):
        return []  # what gathers a sharded model: its memory must not be looked at by numpy, or cannot be freed
    members = [(f".{name}", kept) for name, kept in getattr(value, "__dict__", {}).items()]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                members.append((f".{name}", getattr(value, name)))
    if not _is_foreign(type(value)):
        members.append((f"({type(value).__name__})", type(value)))
    return members


def _is_foreign(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _FOREIGN


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def caller() -> str:
    """Where the caller's own code is: the innermost frame that is neither of torch's nor of this library's."""
    frame = inspect.currentframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "terrine"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the loss"


__all__ = ["Reachable", "caller"]
