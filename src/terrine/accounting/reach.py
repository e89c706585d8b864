"""Where floating point ends: a method that leaves it refuses in words, and never answers with what is left of a number.

Overflow, division by zero and not-a-number raise inside a method; so do arrays that do not fit into memory, and events
nested too deeply. All of them become `UnsupportedEvent`, and the caller asks another method.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from terrine.errors import TerrineError, UnsupportedEvent

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def within_floats(by: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make a method refuse an event whose numbers it cannot hold; `by` is the method's name in the refusal."""

    def guard(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(method)
        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            event = args[0] if args else kwargs.get("event")
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
