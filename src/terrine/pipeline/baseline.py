"""The same model without privacy, for comparison on data that needs none."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine.pipeline.models import Architecture


def unsafe_train(
    architecture: Architecture, features: Tensor, labels: NDArray[np.int64], *, steps: int = 300
) -> nn.Module:
    """Train without clipping or noise: what comes out may tell anything about any row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = architecture.build()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1 if "linear" in architecture.name else 1e-3)
    targets = torch.from_numpy(labels)
    lots = torch.Generator().manual_seed(0)
    for _ in range(steps):
        some = torch.randint(len(features), (min(len(features), 1024),), generator=lots)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(features[some]), targets[some]).backward()
        optimizer.step()
    return module.eval()
