"""How much may be spent."""

from __future__ import annotations

from dataclasses import dataclass

from terrine import check

LARGEST_EPSILON = 1e9


@dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) that may not be exceeded; delta 0 asks for pure DP."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.positive("epsilon", self.epsilon))
        if self.epsilon > LARGEST_EPSILON:
            raise check.refuse("epsilon", self.epsilon, f"at most {LARGEST_EPSILON:g}", "more protects nobody")
        object.__setattr__(self, "delta", check.half_open_unit("delta", self.delta))
