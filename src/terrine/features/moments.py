"""Second moments with noise: a symmetric matrix of Frobenius sensitivity 1 by one Gaussian mechanism [DTTZ14].

Written as the vector of its diagonal and sqrt(2) times what lies above it, a symmetric matrix has the length of its
Frobenius norm; that vector is protected as gradients are, on their grid, and written back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from terrine.common.keys import Draw


def protected_moments(moments: Tensor, draw: Draw, noise: float) -> Tensor:
    """`moments`, which one unit moves by at most 1 in Frobenius norm, with deviation `noise` in every direction."""
    rows, columns = torch.triu_indices(*moments.shape).unbind()
    length = torch.where(rows == columns, 1.0, math.sqrt(2)).double()
    vector = (moments[rows, columns].double() * length).float()
    draw.protect(vector, noise)
    released = torch.zeros_like(moments, dtype=torch.float64)
    released[rows, columns] = vector.double() / length
    released[columns, rows] = vector.double() / length
    return released
