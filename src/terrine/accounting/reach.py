"""Where floating point ends: a method that leaves it refuses in words, and never answers with what is left of a number.

Overflow, division by zero and not-a-number raise inside a method; so do arrays that do not fit into memory. All of them
become `UnsupportedEvent`, and the caller asks another method. Events that would take any method too long, because
samples, choices and random stopping hold each other too deeply, are refused before any looks at them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from terrine.errors import TerrineError, UnsupportedEvent
from terrine.events import Composed, FixedSizeSampled, OneOf, PoissonSampled, RandomStopping

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


_DEEPEST = 6
"""So deep samples, choices and random stopping may be nested; what runs do stays below 4."""
_MOST_INSIDE, _MOST = 4000, 1_000_000
"""So many events they may hold, and so many there may be in all."""


def check_nesting(event: Any, *, by: str) -> None:
    """
    Raises:
        UnsupportedEvent: samples, choices and random stopping are nested too deeply, or hold too many events.
    """
    inside = seen = 0
    left = [(event, 0)]
    while left:
        one, depth = left.pop()
        seen, inside = seen + 1, inside + (depth > 0)
        if depth > _DEEPEST or inside > _MOST_INSIDE or seen > _MOST:
            what = f"nested {_DEEPEST} deep, {_MOST_INSIDE} events inside them and {_MOST} in all"
            raise UnsupportedEvent(event, by=by, hint=f"want samples, choices and stopping at most {what}")
        deeper = depth + isinstance(one, PoissonSampled | FixedSizeSampled | OneOf | RandomStopping)
        inner = one.parts if isinstance(one, Composed | OneOf) else (getattr(one, "event", None),)
        left += [(part, deeper) for part in inner if part is not None]


def within_floats(by: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make a method refuse an event whose numbers it cannot hold; `by` is the method's name in the refusal."""

    def guard(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(method)
        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            event = args[0] if args else kwargs.get("event")
            check_nesting(event, by=by)
            try:
                with np.errstate(over="raise", divide="raise", invalid="raise", under="ignore"):
                    result = method(*args, **kwargs)
            except TerrineError:
                raise
            except (ArithmeticError, ValueError, MemoryError, RecursionError) as error:
                hint = f"its numbers are out of reach ({type(error).__name__}); ask for less extreme ones"
                raise UnsupportedEvent(event, by=by, hint=hint) from error
            if isinstance(result, float) and not math.isfinite(result):
                raise UnsupportedEvent(event, by=by, hint="it finds no finite bound")
            return result

        return guarded

    return guard
