"""What a method hands back: a module, the event that paid for it, and what the audit needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from terrine.audit.scores import Flags, Floats
from terrine.events import Event


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained module with its bill."""

    module: nn.Module
    event: Event
    epsilon: float
    """The certified epsilon: a proven upper bound."""
    delta: float
    scores: Floats | None
    included: Flags | None
    facts: dict[str, Any] = field(default_factory=dict)
    """Public facts for the record: sampler, noise, lots, teachers."""
    accuracy: dict[str, Any] | None = None
    """An accuracy that the event paid for."""
