"""Who masks with whom: everyone in a small round; in a large one, about 2 log n neighbours each. [BBGLR20]

Clients are put on a circle in random order; neighbours are the next ones on either side. The degree is the least, and
at least 2 log2 n, for which it happens in less than one round of a million that so many neighbours of some client drop
out that its masks could not be taken off again.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import bdtr

_SMALL = 24
_FAILURE = 1e-6


@lru_cache(maxsize=256)
def degree(clients: int, dropping: float) -> int:
    """How many neighbours each of `clients` has, of which a share `dropping` may drop out."""
    if clients <= _SMALL:
        return clients - 1
    for even in range(2 * math.ceil(math.log2(clients)), clients - 1, 2):
        if clients * bdtr(threshold(even) - 2, even, 1 - dropping) <= _FAILURE:
            return even
    return clients - 1


def threshold(neighbours: int) -> int:
    """How many shares open a secret: more than half of those who hold one, who are the neighbours and the client."""
    return (neighbours + 1) // 2 + 1


def neighbours(clients: int, each: int, seed: int) -> list[list[int]]:
    """The neighbours of every client, in order; `seed` is public."""
    if each >= clients - 1:
        return [[other for other in range(clients) if other != one] for one in range(clients)]
    circle = np.random.Generator(np.random.Philox(seed)).permutation(clients)
    found: list[list[int]] = [[] for _ in range(clients)]
    for place, one in enumerate(circle):
        steps = [step for step in range(-(each // 2), each // 2 + 1) if step]
        found[int(one)] = sorted(int(circle[(place + step) % clients]) for step in steps)
    return found
