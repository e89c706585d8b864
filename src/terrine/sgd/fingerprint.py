"""Fingerprints of models, losses and settings: what a checkpoint binds its run to.

A step that is repeated has its old noise, so it must have its old gradient. Two values get one fingerprint if they
were made alike: the same classes, code, arguments, closures, attributes and numbers, wherever in memory they lie. What
cannot be seen into (compiled code, generators, open files) counts by its type alone, and of very large tensors some
numbers stand for all.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DEEPEST = 12
_LARGE = 2**22
_PLAIN = str | bytes | int | float | complex | None | torch.dtype | torch.device | torch.Size
_OPAQUE = Optimizer | torch.Generator | np.random.Generator | np.random.RandomState
_FOREIGN = ("torch", "numpy", "builtins", "functools")
"""Packages into whose functions nobody looks further than their code."""


def of_value(value: Any) -> str:
    """The fingerprint of a loss, a schedule or whatever else decides gradients; a module's numbers are part of it."""
    return _digest(_parts(value, frozenset()))


def of_model(model: nn.Module) -> str:
    """The fingerprint of a model's structure: its modules and their settings, its parameters' names, shapes and kinds.

    Numbers of parameters and buffers that a checkpoint restores are not part of it.
    """
    return _digest(_structure(model, frozenset()))


def of_optimizer(optimizer: Optimizer, model: nn.Module) -> dict[str, str]:
    """The fingerprints of the optimizer, by its groups' settings and parameters, and of its learning rates."""
    names = {id(one): name for name, one in model.named_parameters()}
    groups: list[dict[str, Any]] = [
        group | {"params": [names.get(id(one), "?") for one in group["params"]]} for group in optimizer.param_groups
    ]
    rates = [{name: value for name, value in group.items() if name in ("lr", "initial_lr")} for group in groups]
    rest = [{name: value for name, value in group.items() if name not in ("lr", "initial_lr")} for group in groups]
    return {"optimizer": of_value([type(optimizer), rest]), "learning rate": of_value(rates)}


def _digest(parts: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="backslashreplace"))
    return digest.hexdigest()


def _parts(value: Any, inside: frozenset[int], *, hidden: bool = False) -> Iterator[str]:
    """What `value` is made of, as text; `inside` holds what it lies in, to which it may point back.

    `hidden` is for an object whose method decides: what it hides then counts, as in one that can be called.
    """
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if isinstance(value, Tensor | np.ndarray | np.generic):
        yield _numbers(value)
        return
    yield _name(value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else type(value))
    if isinstance(value, types.ModuleType):
        yield value.__name__
    if id(value) in inside or len(inside) > _DEEPEST or isinstance(value, _OPAQUE | type | types.ModuleType):
        return
    inside = inside | {id(value)}
    match value:
        case enum.Enum():
            yield value.name
        case nn.Module():
            yield from _structure(value, inside)
            for name, tensor in value.state_dict().items():
                yield f"{name} {_numbers(tensor)}"
        case functools.partial():
            yield from _parts([value.func, value.args, value.keywords], inside)
        case types.MethodType():
            yield from _parts(value.__func__, inside)
            yield from _parts(value.__self__, inside, hidden=True)
        case types.FunctionType():
            yield from _function(value, inside)
        case Mapping():
            yield from sorted(_digest(_parts(pair, inside)) for pair in value.items())
        case Set():
            yield from sorted(_digest(_parts(one, inside)) for one in value)
        case list() | tuple():
            yield str(len(value))
            for one in value:
                yield from _parts(one, inside)
        case _:
            yield from _object(value, inside, hidden)


def _object(value: Any, inside: frozenset[int], hidden: bool) -> Iterator[str]:
    """An object by its attributes, and by the code that it is called by."""
    called = getattr(type(value), "__call__", None)  # noqa: B004
    if isinstance(called, types.FunctionType):
        yield from _parts(called, inside)
        hidden = not hasattr(value, "load_state_dict")  # its state is the checkpoint's, and goes by hidden names
    for name, one in sorted(_attributes(value).items()):
        if hidden or not name.startswith("_"):
            yield name
            yield from _parts(one, inside)


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        found |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return found


def _structure(module: nn.Module, inside: frozenset[int]) -> Iterator[str]:
    for path, part in module.named_modules():
        yield f"{path} {_name(type(part))}"
        if isinstance(forward := type(part).forward, types.FunctionType):
            yield from _code(forward.__code__)
        for name, value in sorted(vars(part).items()):
            if not name.startswith("_") and name != "training":
                yield name
                yield from _parts(value, inside | {id(module), id(part)})
        lasting = part.state_dict(keep_vars=True)
        for name, buffer in part.named_buffers(recurse=False):
            if name not in lasting:
                yield f"{name} {_numbers(buffer)}"
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name} {one.dtype} {tuple(one.shape)} {one.requires_grad}"


def _function(function: types.FunctionType, inside: frozenset[int]) -> Iterator[str]:
    """A function by its code, its defaults, its closure, and the numbers and functions of its module that it names."""
    yield from _code(function.__code__)
    yield from _parts([function.__defaults__, function.__kwdefaults__], inside)
    for cell in function.__closure__ or ():
        try:
            yield from _parts(cell.cell_contents, inside)
        except ValueError:  # a name that is not bound yet
            yield "empty"
    if function.__module__.partition(".")[0] in _FOREIGN:
        return
    for name in sorted(_named(function.__code__)):
        value = function.__globals__.get(name)
        own = isinstance(value, types.FunctionType) and value.__module__ == function.__module__
        if own or isinstance(value, _PLAIN | Tensor | np.ndarray | list | tuple | dict | functools.partial | nn.Module):
            yield name
            yield from _parts(value, inside)


def _code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield from _parts(constant, frozenset())


def _named(code: types.CodeType) -> set[str]:
    inner = (_named(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def _numbers(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = (value.detach() if value.layout is torch.strided else value.detach().to_dense()).reshape(-1)
        some = flat if flat.numel() <= _LARGE else flat[:: flat.numel() // (_LARGE // 64)]
        content: Any = some.cpu().contiguous().view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    array = np.asarray(value)
    content = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return f"{array.dtype} {array.shape} {hashlib.sha256(content).hexdigest()}"


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(kind).__name__)}"
