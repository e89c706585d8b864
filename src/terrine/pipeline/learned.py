"""What a method hands back: a module, and what the report and the audit need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from terrine.audit.scores import Flags, Floats


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained module."""

    module: nn.Module
    scores: Floats | None
    included: Flags | None
    facts: dict[str, Any] = field(default_factory=dict)
    """Public facts for the record: sampler, noise, lots, teachers."""
    accuracy: dict[str, Any] | None = None
    """An accuracy that the run's event paid for."""
    gradients: tuple[Floats, Flags] | None = None
    """Scores and coins of gradient canaries in a twin."""
