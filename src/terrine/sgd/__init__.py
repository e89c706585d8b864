"""DP-SGD on any PyTorch model: one plan makes the lots, the noise and the event."""

from __future__ import annotations

from terrine.sgd.clipping import Automatic, Flat, PerLayer, clipped_sum
from terrine.sgd.plan import Plan
from terrine.sgd.private import make_private
from terrine.sgd.sampling import FixedSize, Poisson, Shuffled
from terrine.sgd.schedules import Adaptive, Stages
from terrine.sgd.validate import fix

__all__ = ["Adaptive","Automatic","FixedSize","Flat","PerLayer","Plan","Poisson","Shuffled","Stages","clipped_sum","fix","make_private"]
