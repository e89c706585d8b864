"""Tiles: sums of products of a few vectors with a few numbers, which stay in registers until they are written.

sum_rv = sum over positions of number_r vector_v
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from numba.core import cgutils

from terrine.sgd.kernels.vectors import F32, LANES, REGISTERS, Builder, Sums, Value, below, every, load, number, store

TILES = (
    ((1, 8), (1, 16), (1, 12), (2, 8), (2, 12), (3, 8), (4, 6), (6, 4)) if REGISTERS >= 32 else ((1, 8), (2, 6), (3, 4))
)
"""Tiles by the vectors of their width and the numbers spread against them: sums and what is added are in registers."""


@lru_cache(maxsize=1024)
def fastest(numbers: int, spread: int) -> tuple[float, int]:
    """The least time for so many numbers in vectors and so many spread, in half cycles a position, and its tile."""
    return min((_time(*tile, numbers, spread), i) for i, tile in enumerate(TILES))


def _time(vectors: int, high: int, numbers: int, spread: int) -> float:
    """Multiplications, what is read for them and what counts positions."""
    tiles = -(-numbers // (vectors * LANES)) * -(-spread // high)
    return tiles * (vectors * high + 0.25 * (vectors + high) + 2)


@contextmanager
def one_of(builder: Builder, tile: Value) -> Iterator[Iterator[tuple[int, int]]]:
    """Code for every tile, of which the one that was chosen is run."""
    done = builder.append_basic_block("done")
    choice = builder.switch(tile, done)

    def each() -> Iterator[tuple[int, int]]:
        for i, shape in enumerate(TILES):
            block = builder.append_basic_block(f"tile{i}")
            choice.add_case(number(i), block)
            builder.position_at_end(block)
            yield shape
            builder.branch(done)

    yield each()
    builder.position_at_end(done)


def measured(builder: Builder, tile: Value, build: Callable[..., Value], *arguments: Value) -> Value:
    """What build(builder, vectors, high, *arguments) makes of the chosen tile: a number, such as its squares' sum."""
    found = cgutils.alloca_once(builder, F32)
    with one_of(builder, tile) as tiles:
        for vectors, high in tiles:
            builder.store(build(builder, vectors, high, *arguments), found)
    return builder.load(found)


def put(builder: Builder, made: Value, place: Value, mask: Value | None, more: Value) -> None:
    """A vector of sums to its place, or added to what is there."""
    with builder.if_else(more) as (there, fresh):
        with there:
            store(builder, builder.fadd(made, load(builder, place, mask)), place, mask)
        with fresh:
            store(builder, made, place, mask)


class Tile:
    """`vectors` by `high`, of which `lanes` numbers of the vectors and `many` of the spread ones are there."""

    def __init__(self, builder: Builder, vectors: int, high: int, lanes: Value, many: Value) -> None:
        self.builder, self.vectors, self.high, self.many = builder, vectors, high, many
        self._sums = Sums(builder, vectors * high)
        self.masks = [below(builder, list(range(LANES)), number(v * LANES), lanes) for v in range(vectors)]
        self.is_wide = builder.icmp_signed(">=", lanes, number(vectors * LANES))

    def add(self, vectors: Sequence[Value], spread: Sequence[Value]) -> None:
        """One position's products; `spread` are the addresses of its numbers."""
        for r, place in enumerate(spread):
            factor = every(self.builder, self.builder.load(place))
            for v, one in enumerate(vectors):
                self._sums.add(r * self.vectors + v, one, factor)

    def write(self, target: Value, apart: Value, put: Callable[[Value, Value, Value | None], None]) -> None:
        """put(vector, place, mask) for every vector of sums that is there; no mask where all of its numbers are."""
        builder, made = self.builder, self._sums.values()

        def row(r: int, masks: Sequence[Value | None]) -> None:
            to = builder.gep(target, [builder.mul(apart, number(r))])
            for v, mask in enumerate(masks):
                put(made[r * self.vectors + v], builder.gep(to, [number(v * LANES)]), mask)

        whole = builder.and_(self.is_wide, builder.icmp_signed(">=", self.many, number(self.high)))
        with builder.if_else(whole) as (then, otherwise):  # on many a processor writing under a mask is slow
            with then:
                for r in range(self.high):
                    row(r, [None] * self.vectors)
            with otherwise:
                for r in range(self.high):
                    with builder.if_then(builder.icmp_signed("<", number(r), self.many)):
                        row(r, self.masks)
