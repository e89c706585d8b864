"""Second moments with noise: the right deviation in every direction of the Frobenius norm, on the grid, symmetric."""

from __future__ import annotations

import math

import pytest
import torch

from terrine.common.keys import Key, Purpose
from terrine.features.moments import protected_moments

NOISE, WIDTH, DRAWS = 4.0, 6, 2_000


def drawn(seed):
    draw = Key.seeded(seed).draw(Purpose.PROJECTION, 0)
    return protected_moments(torch.zeros(WIDTH, WIDTH), draw, NOISE)


def test_what_is_released_is_symmetric_and_holds_the_moments():
    moments = torch.arange(WIDTH * WIDTH, dtype=torch.float64).reshape(WIDTH, WIDTH)
    moments = moments + moments.T
    found = protected_moments(moments, Key.seeded(0).draw(Purpose.PROJECTION, 0), 2.0**-30)
    assert torch.equal(found, found.T)
    assert torch.allclose(found, moments, atol=1e-5)


@pytest.mark.parametrize("direction", ["diagonal", "off the diagonal", "spread"])
def test_every_direction_of_length_one_gets_the_full_deviation(direction):
    """2,000 draws: the deviation is known to 1.6%; 6% off, as 1/sqrt(2) or sqrt(2) would be by far, fails."""
    towards = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    if direction == "diagonal":
        towards[2, 2] = 1.0
    elif direction == "off the diagonal":
        towards[1, 4] = towards[4, 1] = 1 / math.sqrt(2)
    else:
        towards = torch.ones(WIDTH, WIDTH, dtype=torch.float64) / WIDTH
    along = torch.stack([(drawn(seed) * towards).sum() for seed in range(DRAWS)])
    assert float(along.std()) == pytest.approx(NOISE, rel=0.06)


def test_entries_lie_on_the_grid():
    grid = 2.0 ** (math.floor(math.log2(NOISE)) - 10)
    diagonal = torch.diag(drawn(3))
    assert torch.equal((diagonal / grid).round() * grid, diagonal)
