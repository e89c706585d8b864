"""AES-256 in counter mode by the processor's own instructions, many blocks at once; nothing where it has none.

    bits = AES(key, address, 8 bytes | segment, 4 | counter, 4),  the counter's first value 2, as in GCM

These are the very bits that the cryptography library makes (a test compares them), but every thread makes its own,
where it needs them, without Python's lock.
"""

from __future__ import annotations

import platform
from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from terrine.sgd.kernels.image import Table
from terrine.sgd.kernels.team import WHOLE, WORDS, instruction
from terrine.sgd.kernels.vectors import I64, LANES, Builder, Value, features, loop, number

TOGETHER = LANES // 4 if "vaes" in features() else 1
"""Blocks in one register."""
MADE = 4 * 8 * TOGETHER
"""Words that are made at once: eight registers of them, so that none waits for another."""
ROUNDS = 14


def available() -> bool:
    """Whether the processor that is compiled for has the instructions."""
    return platform.machine().lower() in ("x86_64", "amd64") and "aes" in features()


@lru_cache(maxsize=8)
def schedule(secret: bytes) -> Table:
    """The 15 round keys of a 32-byte key [FIPS 197, section 5.2]."""
    box, words, power = _substitutions(), [secret[i : i + 4] for i in range(0, 32, 4)], 1
    for i in range(8, 4 * (ROUNDS + 1)):
        last = words[-1]
        if i % 8 == 0:
            last = bytes(box[one] for one in last[1:] + last[:1])
            last = bytes([last[0] ^ power]) + last[1:]
            power <<= 1
        elif i % 8 == 4:
            last = bytes(box[one] for one in last)
        words.append(bytes(one ^ other for one, other in zip(words[-8], last, strict=True)))
    keys = np.frombuffer(b"".join(words), dtype=np.int64)
    return Table(keys, keys.ctypes.data)


def _substitutions() -> list[int]:
    """The S-box: inverses in GF(2^8), and an affine map of their bits [FIPS 197, section 5.1.1]."""
    powers = [1]
    for _ in range(254):
        double = powers[-1] << 1
        powers.append(powers[-1] ^ (double ^ 0x11B if double & 0x100 else double))
    inverses = {one: powers[-i % 255] for i, one in enumerate(powers)}

    def mapped(value: int) -> int:
        turns = [(value << shift | value >> (8 - shift)) & 0xFF for shift in range(5)]
        return turns[0] ^ turns[1] ^ turns[2] ^ turns[3] ^ turns[4] ^ 0x63

    return [mapped(inverses.get(one, 0)) for one in range(256)]


@instruction(types.void, WORDS, WHOLE, WORDS, WHOLE, WHOLE, WHOLE)
def stream(
    builder: Builder, target: Value, many: Value, keys: Value, address: Value, segment: Value, counter: Value
) -> None:
    """Write `many` times MADE random words from a block on; address and segment as the bytes of a block have them."""
    vector = ir.VectorType(I64, 2 * TOGETHER)
    width = "" if TOGETHER == 1 else f".{128 * TOGETHER}"

    def call(name: str, *values: Value) -> Value:
        kind = ir.FunctionType(vector, [vector] * len(values))
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    rounds = [_repeated(builder, keys, i) for i in range(ROUNDS + 1)]
    fixed = _pairs(builder, address, segment)
    beside = ir.Constant(vector, [k // 2 * (k % 2) for k in range(2 * TOGETHER)])
    counts = builder.add(_pairs(builder, number(0), counter), beside)
    with loop(builder, many) as turn:
        states = []
        for v in range(8):
            done = builder.add(builder.mul(turn.index, number(8 * TOGETHER)), number(v * TOGETHER))
            swapped = call(f"llvm.bswap.v{2 * TOGETHER}i64", builder.add(counts, _pairs(builder, number(0), done)))
            states.append(builder.xor(builder.or_(fixed, swapped), rounds[0]))
        for key in rounds[1:-1]:
            states = [call(f"llvm.x86.aesni.aesenc{width}", state, key) for state in states]
        states = [call(f"llvm.x86.aesni.aesenclast{width}", state, rounds[-1]) for state in states]
        to = builder.gep(target, [builder.mul(turn.index, number(MADE))])
        for v, state in enumerate(states):
            place = builder.bitcast(builder.gep(to, [number(4 * TOGETHER * v)]), vector.as_pointer())
            builder.store(state, place, align=4)


def _pairs(builder: Builder, one: Value, other: Value) -> Value:
    """(one, other) again and again."""
    pair = ir.VectorType(I64, 2)
    both = builder.insert_element(ir.Constant(pair, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
    return _again(builder, builder.insert_element(both, other, ir.Constant(ir.IntType(32), 1)))


def _repeated(builder: Builder, keys: Value, i: int) -> Value:
    place = builder.bitcast(builder.gep(keys, [number(4 * i)]), ir.VectorType(I64, 2).as_pointer())
    key = builder.load(place)
    key.align = 4
    return _again(builder, key)


def _again(builder: Builder, pair: Value) -> Value:
    kind = ir.VectorType(ir.IntType(32), 2 * TOGETHER)
    return builder.shuffle_vector(pair, ir.Constant(pair.type, ir.Undefined), ir.Constant(kind, [0, 1] * TOGETHER))
