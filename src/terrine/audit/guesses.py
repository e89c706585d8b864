"""How an attacker did on one run's coins: what both one-run theorems count."""

from __future__ import annotations

from dataclasses import dataclass

from terrine import check
from terrine.errors import InvalidArgument


@dataclass(frozen=True)
class Guesses:
    """`correct` of `made` guesses about `canaries` coins."""

    correct: int
    made: int
    canaries: int

    def __post_init__(self) -> None:
        check.whole("canaries", self.canaries)
        if not 0 <= self.correct <= self.made <= self.canaries:
            raise InvalidArgument(
                f"correct={self.correct}, made={self.made}, canaries={self.canaries}: want correct <= made <= canaries"
            )
