"""Trainings: not yet."""

from typing import Any


class Trainings:
    """Nothing yet."""

    def __init__(self, *_: Any) -> None: ...

    def look_after(self) -> None:
        """Nothing yet."""

    def approve(self, row: dict[str, Any], *, by: str, reason: str) -> None:
        """Nothing yet."""

    def cancel(self, session: Any, row: dict[str, Any]) -> None:
        """Nothing yet."""
