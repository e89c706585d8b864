"""Shamir's secret sharing over a prime field: any `threshold` shares give the secret back, fewer say nothing. [Sha79]

A secret of 32 bytes is the value at 0 of a random polynomial of degree threshold - 1; a share is its value at a
holder's own point.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from terrine.errors import InvalidArgument
from terrine.mechanisms.exact import below
from terrine.rng import Source

PRIME = 2**256 + 297
"""The smallest prime above 2^256."""
SHARE_BYTES = 33


def split(secret: bytes, points: Iterable[int], threshold: int, rng: Source) -> dict[int, bytes]:
    """A share of `secret` for each of `points`, which are distinct and not 0."""
    if len(secret) != 32:
        raise InvalidArgument(f"a secret of {len(secret)} bytes: want 32")
    coefficients = [below(PRIME, rng) for _ in range(threshold - 1)]
    found = {}
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * point % PRIME
        found[point] = ((value + int.from_bytes(secret)) % PRIME).to_bytes(SHARE_BYTES)
    return found


def join(shares: dict[int, bytes], threshold: int) -> bytes:
    """The secret, from shares by point: Lagrange's interpolation at 0.

    Raises:
        InvalidArgument: too few shares, or they are not of one secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise InvalidArgument(f"{len(shares)} shares of a secret: want {threshold}")
    chosen = dict(list(shares.items())[:threshold])
    weights = _weights(tuple(chosen))
    total = sum(int.from_bytes(share) * weight for share, weight in zip(chosen.values(), weights, strict=True)) % PRIME
    if total >= 1 << 256:
        raise InvalidArgument("shares that do not belong together: want those of one secret")
    return total.to_bytes(32)


@lru_cache(maxsize=64)
def _weights(points: tuple[int, ...]) -> list[int]:
    """What each point's value counts at 0."""
    found = []
    for point in points:
        over = under = 1
        for other in points:
            if other != point:
                over, under = over * other % PRIME, under * (other - point) % PRIME
        found.append(over * pow(under, -1, PRIME) % PRIME)
    return found
