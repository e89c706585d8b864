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
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

TAKEN, ITEMS, WORKERS, FIRST = range(4)
"""A job begins with the items taken, the items there are and the threads at work; then comes what is the kernel's own."""
SETTINGS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}


def inner(function: Callable[..., Any]) -> Any:
    """Compiled, for kernels to call."""
    return njit(nogil=True, **SETTINGS)(function)


class Kernel:
    """A function of a job's address, compiled when it is first needed."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @cached_property
    def compiled(self) -> Any:
        """Kept between processes where there is room for it."""
        signature = types.void(types.CPointer(types.int64))
        try:
            return cfunc(signature, cache=True, **SETTINGS)(self._function)
        except RuntimeError:  # neither beside this file nor in the user's folders can anything be written
            return cfunc(signature, **SETTINGS)(self._function)

    def work(self, items: int, *job: int) -> None:
        """Have the team do all items of a job."""
        numbers = np.array([0, items, 0, *job], dtype=np.int64)
        threads = min(torch.get_num_threads(), items)
        together = _together() if threads > 1 else None
        if together is None:
            self.compiled.ctypes(numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
        else:
            together(self.compiled.address, numbers.ctypes.data, threads, 0)


@lru_cache(maxsize=1)
def _together() -> Callable[[int, int, int, int], None] | None:
    """OpenMP's "call this function with this argument on so many threads"."""
    try:
        found = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def taken(context: Any, job: Any, counter: Any) -> Any:
    """The next number of a counter of the job, which no other thread gets."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(job, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def floats(context: Any, address: Any) -> Any:
    """The float32 numbers at an address."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def numbers(context: Any, address: Any) -> Any:
    """The whole numbers at an address."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), build
