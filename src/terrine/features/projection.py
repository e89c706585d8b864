"""Private principal components: the leading directions of the data, released once with noise   [DTTZ14]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrine import check
from terrine.common.keys import Key, Purpose
from terrine.events import Event, Gaussian, Neighbours, Reproducible
from terrine.features.moments import protected_moments


@dataclass(frozen=True)
class Projection:
    """Private principal components and what they cost; give `event` to `Plan(preparation=...)`."""

    components: Tensor
    event: Event

    def __call__(self, x: Tensor) -> Tensor:
        """The coordinates of each example, scaled to norm at most 1 as they were when the components were found."""
        return _bounded(x) @ self.components.to(x)


def private_projection(x: Tensor, *, components: int = 60, noise: float = 16.0, seed: int | None = None) -> Projection:
    """The leading eigenvectors of the examples' second moments, released with Gaussian noise [DTTZ14].

    Each example is scaled to norm at most 1, so adding or removing one moves X^T X by at most 1 in Frobenius norm.

    Guarantee: the components cost `Gaussian(noise)` under add/remove neighbours: replacing an example moves X^T X by
    up to sqrt 2, so a plan under other neighbours refuses the event; `seed` is for tests and stamps it.
    """
    rows = _bounded(x.double())  # first: in 16 bits, what was scaled to norm 1 may round to 1.006
    width = rows.shape[1]
    if check.whole("components", components) > width:
        raise check.refuse("components", components, f"at most the {width} features")
    event = Gaussian(noise=noise, neighbours=Neighbours.ADD_REMOVE)
    key = Key.fresh() if seed is None else Key.seeded(seed)
    released = protected_moments(rows.T @ rows, key.draw(Purpose.PROJECTION, 0), event.noise)
    vectors = torch.linalg.eigh(released).eigenvectors[:, -components:].flip(1)
    return Projection(vectors.to(torch.get_default_dtype()), event if seed is None else Reproducible(event))


def _bounded(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    flat = torch.where(flat.isfinite().all(dim=1, keepdim=True), flat, 0.0)  # a row that is no number adds nothing
    bounded: Tensor = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1.0)
    return bounded
