"""Correlated noise, step after step: y = C^-1 z by forward substitution, from the run's key.

    y_t = norm(c) z_t - c_1 y_{t-1} - ... - c_{b-1} y_{t-b+1}          (c_0 = 1)

z_t has the address of step t, so y_t depends on the key and t alone. A run that goes on after a crash makes the vectors
it needs again, from step 0: that takes the time of so many draws, and no noise is ever written to disk. A step that was
skipped has its noise as well, which nobody sees; no noise is used for two steps.

Rounding. The vectors do not depend on the data, and errors do not pile up: those of one step in float32 are as if z_t
had been off by some 2^-24 of the vectors it is made of, however many steps there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from terrine.common.keys import Key, Purpose, grid_of
from terrine.common.normal_values import BLOCK, LARGE
from terrine.errors import OutOfOrder
from terrine.sgd.correlated import Banded

log = logging.getLogger("terrine.sgd")


class CorrelatedNoise:
    """The noise of one run for `parameters`, in order; holds the last bands - 1 vectors, in single precision."""

    def __init__(self, banded: Banded, key: Key, parameters: Iterable[Tensor]) -> None:
        self._banded, self._key = banded, key
        self._like = [(one.device, one.numel()) for one in parameters]
        self._past: dict[torch.device, Tensor] = {}  # (bands - 1, numbers); y_t lies in row t mod (bands - 1)
        self._following = 0
        log.warning(
            "correlated noise keeps %d vectors of %d numbers: %.1f MB beside the model",
            banded.bands - 1,
            sum(count for _, count in self._like),
            self.memory / 1e6,
        )

    @property
    def memory(self) -> int:
        """The bytes that are kept from step to step."""
        return 4 * (self._banded.bands - 1) * sum(count for _, count in self._like)

    def protect(self, totals: Sequence[Tensor], step: int, deviation: float, over: float = 1.0) -> None:
        """Add the noise of `step` in place, round to a public grid, and divide by `over`.

        `deviation` is that of z. The grid is 2^-10 of what is new in the noise of a step, given all steps before.

        Raises:
            OutOfOrder: the step is over.
        """
        grid = grid_of(deviation * self._banded.sensitivity)
        for total, noise in zip(totals, self.at(step), strict=True):
            wide = total.to(torch.promote_types(total.dtype, torch.float32)).mul_(1 / grid)
            wide.add_(noise.view(total.shape), alpha=deviation / grid).round_().mul_(grid / over)
            if wide is not total:
                total.copy_(wide)

    def at(self, step: int) -> list[Tensor]:
        """The noise of `step` for each parameter, flat, for z of deviation 1; until the next step is asked for.

        Raises:
            OutOfOrder: a later step was asked for before.
        """
        if step < self._following:
            raise OutOfOrder(f"the noise of step {step + 1} was used; want step {self._following + 1} or later")
        while self._following <= step:
            self._advance()
        row = step % (self._banded.bands - 1)
        parts = {
            device: iter(past[row].split([count for one, count in self._like if one == device]))
            for device, past in self._past.items()
        }
        return [next(parts[device]) for device, _ in self._like]

    def _advance(self) -> None:
        if not self._past:
            self._past = self._zeros()
        step, self._following = self._following, self._following + 1
        draw, rows, c = self._key.draw(Purpose.NOISE, step), self._banded.bands - 1, self._banded.coefficients
        for device, past in self._past.items():
            for here in past.split(BLOCK if device.type == "cpu" else LARGE, dim=1):
                new = here[step % rows].mul_(-c[rows])  # the oldest vector makes room for the newest
                for back in range(1, rows):
                    new.sub_(here[(step - back) % rows], alpha=c[back])
            draw.add_normal(past[step % rows], self._banded.sensitivity)

    def _zeros(self) -> dict[torch.device, Tensor]:
        rows, devices = self._banded.bands - 1, dict.fromkeys(device for device, _ in self._like)
        sizes = {one: sum(count for device, count in self._like if device == one) for one in devices}
        return {device: torch.zeros(rows, size, device=device) for device, size in sizes.items()}


__all__ = ["CorrelatedNoise"]
