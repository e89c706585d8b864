"""How often a step waits for the device: numbers that go to the CPU, and shapes that depend on numbers."""

import traceback
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from terrine import sgd

from . import pretend

WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "repeat_interleave", "is_nonzero"}


class Synchronisations(TorchDispatchMode):
    """Counts what would wait for the device, by the place of ours that asks for it."""

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        there = any(self.is_there(leaf) for leaf in pytree.tree_leaves((args[name == "copy_" :], kwargs)))
        here = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        if there and (name in WAITS or (name in ("_to_copy", "copy_") and here)):
            self.places[f"{self.place()} {name}"] += 1
        return result

    @staticmethod
    def is_there(leaf):
        return isinstance(leaf, torch.Tensor) and leaf.device.type == pretend.NAME

    @staticmethod
    def place():
        ours = [frame for frame in traceback.extract_stack() if "/terrine/" in frame.filename]
        return f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].name}" if ours else "elsewhere"


def mlp():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    )


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))


MODELS = {"mlp": (mlp, (20,)), "cnn": (cnn, (2, 8, 8)), "transformer": (encoder, (5, 8))}
MOST = 1
"""A microbatch: whether the gradient of an example is not finite. Layers never ask."""


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": sgd.Automatic(1.0)}, {"correlated": sgd.Banded(2)}],
    ids=["flat", "automatic", "correlated"],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_once_a_microbatch(there, name, options):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(there)
    data = torch.randn(64, *shape, device=there), torch.randint(3, (64,), device=there)
    plan = sgd.Plan(**{"examples": 64, "lot": 32, "steps": 60, "clip": 1.0, "noise": 1.0, "delta": 1e-5, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss())
    for _ in range(4):
        next(steps)
        optimizer.step()
    counts = []
    for _ in range(4):
        with Synchronisations() as waits:
            next(steps)
            optimizer.step()
        counts.append(waits.places)
    fewest = min(counts, key=Counter.total)  # one step in 32 looks at the state of model and loss as well
    print(name, options, fewest.total(), dict(fewest))
    assert fewest.total() <= MOST, fewest
