"""Attack: two runs that are alive at once go on from one checkpoint, each with a loss of its own.

Each would draw the same noise for the same step, and neither would see what the other released.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import OutOfOrder
from terrine.sgd.checkpoint import Checkpoint

PLAN = {"examples": 40, "lot": 20, "steps": 6, "clip": 1.0, "noise": 1.0, "delta": 1e-5}


def begun(path, every=100):
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    moves = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    module, moves, lots = sgd.make_private(
        module, moves, data, sgd.Plan(**PLAN), checkpoint=Checkpoint(path, every=every)
    )
    lots = iter(lots)

    def step(scale):
        x, y = next(lots)
        moves.zero_grad()
        (scale * functional.cross_entropy(module(x), y)).backward()
        moves.step()
        return module.weight.grad.clone()

    return step


def test_the_one_that_went_on_last_is_the_only_one(tmp_path):
    first = begun(tmp_path / "run.pt")
    released = first(1.0)
    second = begun(tmp_path / "run.pt")  # while the first is alive
    with pytest.raises(OutOfOrder, match="another run went on from the same checkpoint"):
        first(1.0)
    assert torch.equal(second(1.0), released)
    second(1.0)


def test_a_checkpoint_that_another_wrote_meanwhile_is_not_gone_on_with(tmp_path, monkeypatch):
    path, opened = tmp_path / "run.pt", Checkpoint.open
    begun(path)(1.0)

    def overtaken(self, *given, **more):
        found = opened(self, *given, **more)
        if not overtaking:
            overtaking.append(True)
            step = begun(path, every=1)  # reads, takes over and saves, between this one's reading and its taking over
            for _ in range(3):
                step(1.0)
        return found

    overtaking = []
    monkeypatch.setattr(Checkpoint, "open", overtaken)
    with pytest.raises(OutOfOrder, match="another run"):
        begun(path)
