"""Where a curve changes its sign: bisection, and inverse quadratic interpolation where that may be trusted.

Chandrupatla, "A new hybrid quadratic/bisection algorithm for finding the zero of a nonlinear function without using
derivatives", Advances in Engineering Software 28(3), 1997. Nothing certified rests on it: who asks for a root checks
what was found. `scipy.optimize` would do as well, but importing it takes longer than most answers.
"""

from __future__ import annotations

from collections.abc import Callable

_MOST_STEPS = 2000
"""Halving any two floats comes to an end before."""


def root(curve: Callable[[float], float], low: float, high: float, *, xtol: float, rtol: float = 1e-15) -> float:
    """A point between `low` and `high` within about `xtol` + `rtol` times itself of a change of sign of `curve`.

    Raises:
        ValueError: `curve` has the same sign at both ends.
    """
    a, b = low, high
    at_a, at_b = curve(a), curve(b)
    if at_a == 0 or at_b == 0:
        return a if at_a == 0 else b
    if (at_a > 0) == (at_b > 0):
        raise ValueError(f"no change of sign between {low} and {high}")
    share = 0.5
    for _ in range(_MOST_STEPS):
        x = a + share * (b - a)
        at_x = curve(x)
        if (at_x > 0) == (at_a > 0):
            c, at_c = a, at_a
        else:
            c, at_c, b, at_b = b, at_b, a, at_a
        a, at_a = x, at_x
        best, least = (a, at_a) if abs(at_a) < abs(at_b) else (b, at_b)
        limit = (rtol * abs(best) + xtol) / max(abs(b - a), 1e-320)
        if least == 0 or limit > 0.5:
            return best
        share = min(1 - limit, max(limit, _interpolated(a, b, c, at_a, at_b, at_c)))
    return best


def _interpolated(a: float, b: float, c: float, at_a: float, at_b: float, at_c: float) -> float:
    """How far from a to b the parabola x(f) through three points puts the root; half, where it may not be trusted."""
    place, height = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b) if at_c != at_b else 0.0
    if not (height**2 < place and (1 - height) ** 2 < 1 - place):
        return 0.5
    across = (c - a) / (b - a)
    return at_a / (at_b - at_a) * at_c / (at_b - at_c) + across * at_a / (at_c - at_a) * at_b / (at_c - at_b)
