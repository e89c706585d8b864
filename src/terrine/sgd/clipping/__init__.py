"""Per-example gradient clipping: exact, on any model, at about the cost of the plain step."""

from __future__ import annotations

from terrine.sgd.clipping.clipper import Clipper, clipped_sum
from terrine.sgd.clipping.policy import Automatic, ClippingRule, Flat, PerLayer
from terrine.sgd.clipping.summing import Clipped

__all__ = ["Automatic", "Clipped", "Clipper", "ClippingRule", "Flat", "PerLayer", "clipped_sum"]
