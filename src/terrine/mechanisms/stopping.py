"""How often to run: an exact draw of the count in a `RandomStopping` event [PS22].

Only coins with rational chances are tossed, so the law is the one that was priced, without rounding.

    negative binomial   a geometric k, kept with probability prod_{0 < l < k} (l + shape) / (l + 1)
    Poisson, mean m     a sum of equal parts of mean a <= 1/2, each drawn as: how many coins of chance a/1, a/2, ...
                        show true before the first that does not, so that P(N >= k) = a^k / k!; a k is kept with
                        probability (1 - a)(k + 1) / (k + 1 - a), which leaves a^k / k! but for a constant
"""

from __future__ import annotations

import math
from fractions import Fraction

from terrine import check
from terrine.events.stopping import Count, NegativeBinomialCount, PoissonCount
from terrine.mechanisms.exact import coin
from terrine.rng import SYSTEM, Source


def draw_count(count: Count, rng: Source = SYSTEM) -> int:
    """The number of runs. It is as secret as the runs that are not shown.

    Raises:
        InvalidArgument: a negative binomial of shape above 1, for which there is no exact draw here.
    """
    match count:
        case NegativeBinomialCount(shape=shape, gamma=gamma):
            if shape > 1:
                raise check.refuse("shape", shape, "at most 1 to draw from")
            return _negative_binomial(Fraction(shape), Fraction(gamma), rng)
        case PoissonCount(mean=mean):
            parts = math.ceil(2 * mean)
            return sum(_poisson(Fraction(mean) / parts, rng) for _ in range(parts))


def _negative_binomial(shape: Fraction, gamma: Fraction, rng: Source) -> int:
    while True:
        times = 1
        while not coin(gamma, rng):
            times += 1
        if all(coin((step + shape) / (step + 1), rng) for step in range(1, times)):
            return times


def _poisson(mean: Fraction, rng: Source) -> int:
    while True:
        times = 0
        while coin(mean / (times + 1), rng):
            times += 1
        if coin((1 - mean) * (times + 1) / (times + 1 - mean), rng):
            return times
