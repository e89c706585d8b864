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
import io
import logging
import math
import random
import sys
import time
import traceback
import types
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument

_FOREIGN: tuple[str, ...] = ("torch", "numpy", "scipy", "sklearn", "terrine", "transformers", "peft", "timm")
_FOREIGN += ("lightning", "accelerate", "rich", "builtins", "functools", "typing", "collections", "logging", "abc")
_FOREIGN += ("enum", "dataclasses", "torchmetrics")
"""Packages into whose functions and classes nobody looks; their objects' attributes are seen all the same."""
_BOOKKEEPING = ("terrine.sgd.run", "terrine.sgd.release", "terrine.sgd.clipping.clipper")
"""Modules of the run itself, which its optimizer's hooks lead to and which goes on while examples run."""
_PLAIN = str | bytes | int | float | complex | None | torch.dtype | torch.device | torch.Size | slice | range
_SMALL = 1 << 18  # numbers of a tensor that are compared; of a larger one, about as many
_FIRST, _SHARE = 3, 40  # batches that are always looked at; how much of the time later looks leave
_MOST = 200_000  # entries that are looked at

_SAID: set[int] = set()

Path = tuple[Any, ...]
log = logging.getLogger("terrine.sgd")


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


class Watch:
    """Looks at the state of some roots around batches: at each, as long as that takes a twentieth of the time."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots, self._looks = dict(roots), 0
        self._seconds, self._last = 0.0, -math.inf

    @contextmanager
    def watching(self, *, always: bool = False) -> Iterator[None]:
        """Refuse what changes meanwhile.

        Raises: InvalidArgument
        """
        begun = time.monotonic()
        if not (always or self._looks < _FIRST or begun - self._last >= _SHARE * self._seconds):
            yield
            return
        reachable = Reachable(self._roots)
        self._looks, self._last, self._seconds = self._looks + 1, time.monotonic(), time.monotonic() - begun
        yield
        check_state(reachable)


def check_state(reachable: Reachable | None) -> None:
    """Refuse a program that has kept something since the state was noted.

    Raises: InvalidArgument
    """
    if reachable is not None and (changed := reachable.changed()):
        raise InvalidArgument(
            f"{changed} changed while examples ran: what is kept of one would meet later ones; want a loss and a model "
            "that keep nothing"
        )


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
    if waiting and _MOST not in _SAID:
        _SAID.add(_MOST)
        log.warning("state beyond %d objects that the loss or the model can reach is not compared", _MOST)


def _describe(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """What a thing is, None where that is its identity, and what it holds."""
    if isinstance(value, Tensor):
        own = {name: kept for name, kept in vars(value).items() if not name.startswith("_terrine")}
        return _describe_tensor(value), [(f".{name}", kept) for name, kept in own.items()]
    if isinstance(value, np.ndarray | np.generic | bytearray | array):
        content = np.asarray(value)
        return (id(value) if isinstance(value, np.ndarray) else 0, content.shape, _digest(content.tobytes())), []
    if isinstance(value, io.StringIO | io.BytesIO):
        return (id(value), value.getvalue()), []
    if isinstance(value, weakref.ref):
        return None, [("()", value())]
    if isinstance(value, torch.Generator):
        return (id(value), _digest(value.get_state().numpy().tobytes())), []
    if isinstance(value, np.random.Generator):
        return (id(value), repr(value.bit_generator.state)), []
    if isinstance(value, np.random.RandomState):
        return (id(value), repr(value.get_state())), []
    if isinstance(value, random.Random):
        return (id(value), hash(value.getstate())), []
    if isinstance(value, dict):
        order = tuple(key if isinstance(key, _PLAIN) else id(key) for key in value)
        members = [
            (f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{type(key).__name__} {index}]", member)
            for index, (key, member) in enumerate(value.items())
        ]
        return (id(value), order), members + _subclass_members(value, dict)
    if isinstance(value, list | tuple | deque):
        identity = None if isinstance(value, tuple) else id(value)
        members = [(f"[{index}]", member) for index, member in enumerate(value)]
        return (identity, len(value)), members + _subclass_members(value, list, tuple, deque)
    if isinstance(value, set | frozenset):
        plain = sorted(repr(member) for member in value if isinstance(member, _PLAIN))
        return (len(value), plain), [("{}", member) for member in value if not isinstance(member, _PLAIN)]
    if isinstance(value, types.BuiltinFunctionType):  # such as a list's append
        owner = value.__self__
        hides = not isinstance(owner, types.ModuleType | None)
        return None, [(f" ({value.__name__} of a {type(owner).__name__})", owner)] if hides else []
    if isinstance(value, property):
        return None, [(".get", value.fget), (".set", value.fset)]
    if isinstance(value, types.ModuleType | types.CodeType):
        return None, []
    aside = torch.autocast | logging.Logger | logging.Handler
    if isinstance(value, aside) or type(value).__module__ in _BOOKKEEPING:
        return None, []
    if isinstance(value, functools.partial):
        return None, [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if callable(getattr(value, "cache_info", None)):
        hits = value.cache_info()
        return (id(value), hits.misses, hits.currsize), []
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
    if tensor.is_nested:
        return id(tensor)
    identity = (id(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, len(tensor._backward_hooks or ()))
    plain = tensor.layout is torch.strided and not tensor.is_meta
    if isinstance(tensor, nn.Parameter) or not plain:
        return identity
    try:  # by its numbers alone: what is computed again from parameters, as by weight_norm, is no other
        numbers = tensor.detach().flatten()[:: max(1, tensor.numel() // _SMALL)].cpu().contiguous()
    except RuntimeError:  # it was kept from inside vmap, and holds nothing any more
        return identity
    return (*identity[1:3], _digest(numbers.view(torch.uint8).numpy().tobytes()))


def _iterator_state(value: Any) -> Any:
    """How far an iterator is: a number of its own where that cannot be told, so that it counts as changed."""
    if inspect.isgenerator(value):
        return id(value), getattr(value.gi_frame, "f_lasti", None), repr(getattr(value.gi_frame, "f_locals", None))
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        return (id(value), repr(value)) if type(value).__name__ == "count" else object()
    return None


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


def _subclass_members(value: Any, *kinds: type) -> list[tuple[str, Any]]:
    """The attributes of an object of a class that is more than one of these."""
    return [] if type(value) in kinds else [(f".{name}", kept) for name, kept in getattr(value, "__dict__", {}).items()]


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


def caller(failure: BaseException | None = None) -> str:
    """Where the caller's own code is, now or in a failure: the innermost line of neither torch nor this library."""
    if failure is not None and "place" in vars(failure):
        return str(vars(failure)["place"])
    steps = traceback.walk_stack(None) if failure is None else reversed(list(traceback.walk_tb(failure.__traceback__)))
    for frame, line in steps:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "terrine") and package not in sys.stdlib_module_names:
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return "the loss"


__all__ = ["Reachable", "Watch", "caller", "check_state"]
