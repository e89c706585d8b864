"""Per-example gradient clipping: exact, on any model, at about the cost of the plain step.

clipped_sum(model, criterion, x, y, clip=1.0)     owns forward and backward
Recorder(model, clip=1.0)                         watches the user's own forward and backward
"""

from __future__ import annotations

from terrine.sgd.clipping.lot import clipped_sum
from terrine.sgd.clipping.policy import Automatic, ClippingRule, Flat, PerLayer
from terrine.sgd.clipping.recorder import Recorder
from terrine.sgd.clipping.reduction import reduction_scale
from terrine.sgd.clipping.registry import rule
from terrine.sgd.clipping.result import Clipped

__all__ = [
    "Automatic",
    "Clipped",
    "ClippingRule",
    "Flat",
    "PerLayer",
    "Recorder",
    "clipped_sum",
    "reduction_scale",
    "rule",
]
