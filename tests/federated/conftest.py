"""Plans and vectors for small rounds."""

import numpy as np
import pytest

from terrine import federated

KINDS = {"skellam": federated.Skellam, "discrete gaussian": federated.DiscreteGaussian}


def small_plan(kind=federated.Skellam, *, per_round=8, survivors=6, **changes):
    asked = {"clients": 40, "per_round": per_round, "rounds": 5, "clip": 1.0, "noise": 1.0, "delta": 1e-3}
    sums = kind(bits=changes.pop("bits", 20), survivors=survivors, colluding=changes.pop("colluding", 0))
    return federated.Plan(**asked | {"sums": sums} | changes)


@pytest.fixture
def vectors():
    drawn = np.random.default_rng(4).normal(size=(8, 24))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True) * 0.9
