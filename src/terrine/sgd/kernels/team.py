"""Compiled work on the very threads that torch computes with.

Threads of one's own would find the processor taken: torch's wait for its next operation awake. They are a team of the
OpenMP library that torch has loaded, and that library takes any function; where there is none of that name, and where
torch has one thread, the caller works alone.

A kernel is compiled for one argument, the address of a job: whole numbers, addresses among them. Every thread takes the
next item of the job until none is left.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable
from functools import cached_property, lru_cache
from hashlib import sha256
from inspect import Parameter, Signature
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, TypeVar, cast

import torch
from llvmlite import ir
from numba import cfunc, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from terrine.sgd.kernels.vectors import F32, I32, I64, Builder, Value, number

TAKEN, ITEMS, WORKERS, FIRST = range(4)
"""A job begins with the items taken, the items there are and the threads at work; then comes the kernel's own."""
T = TypeVar("T")
_one_at_a_time = Lock()
SETTINGS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}


def inner(function: Callable[..., Any]) -> Any:
    """Compiled, for kernels to call."""
    return njit(nogil=True, **SETTINGS)(function)


def kept(compiled: Callable[[bool], T]) -> T:
    """What is compiled, told to keep it between processes where there is room for it."""
    with _one_at_a_time:
        before, config.CACHE_DIR = config.CACHE_DIR, _folder()
        try:
            return compiled(True)
        except RuntimeError:  # neither beside this file nor in the user's folders can anything be written
            return compiled(False)
        finally:
            config.CACHE_DIR = before


class Kernel:
    """A function of a job's address, compiled when it is first needed; `available`, whether it can be."""

    all: ClassVar[list[Kernel]] = []

    def __init__(self, function: Callable[[Any], None], *, available: bool = True) -> None:
        self._function = function
        if available:
            self.all.append(self)

    @cached_property
    def compiled(self) -> Any:
        """What the team calls."""
        signature = types.void(types.CPointer(types.int64))
        return kept(lambda cache: cfunc(signature, cache=cache, **SETTINGS)(self._function))

    def work(self, items: int, *job: int) -> None:
        """Have the team do all items of a job; where there are none, nothing is touched."""
        if not items:
            return
        numbers = array("q", (0, items, 0, *job))
        threads = min(torch.get_num_threads(), items)
        together = _together() if threads > 1 else None
        address, _ = numbers.buffer_info()
        if together is None:
            self.compiled.ctypes(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)))
        else:
            together(self.compiled.address, address, threads, 0)


@lru_cache(maxsize=1)
def _folder() -> str:
    """Where kernels are kept: apart for every state of their sources, of which one kernel may need several."""
    sources = Path(__file__).parent
    state = sha256(b"".join(file.read_bytes() for file in sorted(sources.glob("*.py"))))
    return str(sources / "__pycache__" / state.hexdigest()[:16])


@lru_cache(maxsize=1)
def _together() -> Callable[[int, int, int, int], None] | None:
    """OpenMP's "call this function with this argument on so many threads"."""
    try:
        found = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return cast(Callable[[int, int, int, int], None], found)


AT, TABLE, WHOLE = types.CPointer(types.float32), types.CPointer(types.int64), types.int64
WORDS = types.CPointer(types.uint32)


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of LLVM's builder, and of values of these types, something that kernels can call."""

    def decorate(build: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:  # noqa: ARG001  numba calls it so
            def code(context: Any, builder: Builder, signature: Any, values: Any) -> Any:
                made = build(builder, *values)
                if isinstance(made, tuple) and made:
                    return context.make_tuple(builder, signature.return_type, made)
                return made or context.get_dummy_value()

            return result(*arguments), code

        names = ["context", *(f"value{i}" for i in range(len(arguments)))]  # numba wants to see each by a name
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = build.__name__, build.__doc__
        return intrinsic(typed)

    return decorate


def by_itself(*results: Any) -> Callable[[Callable[..., Any]], Callable[..., tuple[Value, ...]]]:
    """Have what is built be a function of its own, so that its loops have all registers to themselves."""

    def decorate(build: Callable[..., Any]) -> Callable[..., tuple[Value, ...]]:
        def call(builder: Builder, *values: Value) -> tuple[Value, ...]:
            name = f"{build.__module__}.{build.__name__}"
            function = builder.module.globals.get(name)
            if function is None:
                found = ir.LiteralStructType(results) if results else ir.VoidType()
                kind = ir.FunctionType(found, [value.type for value in values])
                function = ir.Function(builder.module, kind, name)
                function.linkage = "internal"
                function.attributes.add("noinline")
                inside = ir.IRBuilder(function.append_basic_block())
                returned = build(inside, *function.args)
                _ = inside.ret(cgutils.pack_struct(inside, returned)) if results else inside.ret_void()
            made = builder.call(function, values)
            return tuple(builder.extract_value(made, i) for i in range(len(results)))

        call.__name__, call.__doc__ = build.__name__, build.__doc__
        return call

    return decorate


@instruction(WHOLE, TABLE, WHOLE)
def taken(builder: Builder, job: Value, counter: Value) -> Value:
    """The next number of a counter of the job, which no other thread gets."""
    return builder.atomic_rmw("add", builder.gep(job, [counter]), number(1), "monotonic")


@instruction(AT, WHOLE)
def floats(builder: Builder, address: Value) -> Value:
    """The float32 numbers at an address."""
    return builder.inttoptr(address, F32.as_pointer())


@instruction(TABLE, WHOLE)
def numbers(builder: Builder, address: Value) -> Value:
    """The whole numbers at an address."""
    return builder.inttoptr(address, I64.as_pointer())


@instruction(WORDS, WHOLE)
def words(builder: Builder, address: Value) -> Value:
    """The 32-bit words at an address."""
    return builder.inttoptr(address, I32.as_pointer())
