"""Per-example gradient clipping: exact, on any model, at about the cost of the plain step."""

from __future__ import annotations

from terrine.sgd.clipping.clipper import Clipper, clipped_sum
from terrine.sgd.clipping.sums import Automatic, Clipped, ClippingRule, Flat, PerLayer

__all__ = ["Automatic", "Clipped", "Clipper", "ClippingRule", "Flat", "PerLayer", "clipped_sum"]
