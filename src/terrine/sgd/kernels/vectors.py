"""Vectors of float32 in compiled code: as long as the processor's registers, and as many as it has.

What a loop over them is made of is written as LLVM's own instructions: left to itself the compiler takes registers half
as long, and sums one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

from llvmlite import ir
from numba import config
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

F32, I64, I32, I1 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(1)


def features() -> frozenset[str]:
    """What the processor that numba compiles for can do: this one, unless numba's settings name another."""
    said: str = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(one[1:] for one in said.split(",") if one.startswith("+"))


def registers() -> tuple[int, int]:
    """How many numbers a register has room for, and how many registers there are."""
    there = features()
    if "avx512f" in there:
        return 16, 32
    if "avx2" in there:
        return 8, 16
    return 4, 32 if "neon" in there else 16


LANES, REGISTERS = registers()
VECTOR, MASK = ir.VectorType(F32, LANES), ir.VectorType(I1, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
Value: TypeAlias = Any  # of LLVM's own types
Builder: TypeAlias = Any


def number(value: int) -> Value:
    """A whole number."""
    return ir.Constant(I64, value)


def every(builder: Builder, value: Value) -> Value:
    """A vector of one value."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _places([0] * LANES))


def below(builder: Builder, values: list[int], first: Value, limit: Value) -> Value:
    """Where first + value is less than the limit: a mask."""
    offsets = builder.add(every(builder, first), ir.Constant(ir.VectorType(I64, LANES), values))
    return builder.icmp_signed("<", offsets, every(builder, limit))


def equal(builder: Builder, values: list[int], difference: Value) -> Value:
    """Where difference + value is 0: a mask."""
    offsets = builder.add(every(builder, difference), ir.Constant(ir.VectorType(I64, LANES), values))
    return builder.icmp_signed("==", offsets, ir.Constant(ir.VectorType(I64, LANES), [0] * LANES))


def root(builder: Builder, vector: Value) -> Value:
    """Square roots; of a negative number, nan."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.sqrt.v{LANES}f32"
    )
    return builder.call(function, [vector])


def load(builder: Builder, pointer: Value, mask: Value | None = None) -> Value:
    """A vector from anywhere in memory; zero, and the memory not touched, where a mask is not."""
    if mask is None:
        found = builder.load(builder.bitcast(pointer, VECTOR.as_pointer()))
        found.align = 4
        return found
    kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), I32, MASK, VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return builder.call(function, [builder.bitcast(pointer, VECTOR.as_pointer()), ir.Constant(I32, 4), mask, ZERO])


def store(builder: Builder, value: Value, pointer: Value, mask: Value | None = None) -> None:
    """Write a vector to anywhere in memory; where a mask is not, nothing is touched."""
    if mask is None:
        builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        return
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, VECTOR.as_pointer(), I32, MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(function, [value, builder.bitcast(pointer, VECTOR.as_pointer()), ir.Constant(I32, 4), mask])


def prefetch(builder: Builder, pointer: Value, written: bool = False, close: int = 3) -> None:
    """Have what will be read, or written, there come closer; whether there is anything does not matter."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(I32, value) for value in (int(written), close, 1))])


class Sums:
    """Vectors that are added to in a loop, in registers of their own."""

    def __init__(self, builder: Builder, many: int) -> None:
        self._builder = builder
        self._places = [cgutils.alloca_once_value(builder, ZERO) for _ in range(many)]
        for place in self._places:
            builder.store(ZERO, place)

    def add(self, i: int, one: Value, other: Value) -> None:
        """Sum i += one * other."""
        product = self._builder.fmul(one, other, flags=("contract",))
        total = self._builder.fadd(self._builder.load(self._places[i]), product, flags=("contract",))
        self._builder.store(total, self._places[i])

    def put(self, values: list[Value]) -> None:
        """These instead."""
        for value, place in zip(values, self._places, strict=True):
            self._builder.store(value, place)

    def values(self) -> list[Value]:
        return [self._builder.load(place) for place in self._places]


def loop(builder: Builder, many: Value) -> AbstractContextManager[Any]:
    """`with loop(builder, many) as i`: as often as said, `i.index` from 0 on."""
    return cast(AbstractContextManager[Any], cgutils.for_range(builder, many))


class Stretch:
    """Numbers side by side, as vectors: all that are whole, then what is left under a mask."""

    def __init__(self, builder: Builder, width: Value) -> None:
        self._builder = builder
        self._whole, self._rest = builder.udiv(width, number(LANES)), builder.urem(width, number(LANES))
        self._mask = below(builder, list(range(LANES)), number(0), self._rest)

    def each(self, body: Callable[[Value, Value | None], None]) -> None:
        """body(offset, mask) for every vector; no mask where all of its numbers are there."""
        builder = self._builder
        with loop(builder, self._whole) as i:
            body(builder.mul(i.index, number(LANES)), None)
        with builder.if_then(builder.icmp_unsigned(">", self._rest, number(0))):
            body(builder.mul(self._whole, number(LANES)), self._mask)


def added(builder: Builder, vectors: list[Value]) -> Value:
    """The vectors' sum."""
    first, *others = vectors
    for other in others:
        first = builder.fadd(first, other)
    return first


def total(builder: Builder, vector: Value) -> Value:
    """The sum of a vector's numbers."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(F32, [F32, VECTOR]), f"llvm.vector.reduce.fadd.v{LANES}f32"
    )
    return builder.call(function, [ir.Constant(F32, 0.0), vector], fastmath=("reassoc",))


def totals(builder: Builder, vectors: list[Value]) -> list[Value]:
    """The sum of every vector's numbers, LANES such sums to a vector, in order."""
    part = LANES
    while part > 1:
        half = part // 2
        low = [start + i for start in range(0, 2 * LANES, part) for i in range(half)]
        high = [place + half for place in low]
        vectors = [
            builder.fadd(
                builder.shuffle_vector(one, other, _places(low)), builder.shuffle_vector(one, other, _places(high))
            )
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        part = half
    return vectors


def transposed(builder: Builder, vectors: list[Value]) -> list[Value]:
    """LANES vectors as a matrix, turned."""
    part = LANES
    while part > 1:
        half = part // 2
        made = list(vectors)
        low = [i if i % part < half else LANES + i - half for i in range(LANES)]
        high = [place + half for place in low]
        for i in (i for i in range(LANES) if i % part < half):
            one, other = vectors[i], vectors[i + half]
            made[i] = builder.shuffle_vector(one, other, _places(low))
            made[i + half] = builder.shuffle_vector(one, other, _places(high))
        vectors, part = made, half
    return vectors


def _places(indices: list[int]) -> Value:
    return ir.Constant(ir.VectorType(I32, LANES), indices)
