"""What a layer makes may be changed in place by the next one, as `ReLU(inplace=True)` does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.sgd.clipping import alone, clipped_sum

from .helpers import run_loop, whole_lots
from .oracle import assert_same, loop

N, CHANNELS, SIDE = 24, 16, 12


class Turned(nn.Module):
    """A layer of sequences on images: every pixel is a step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x.flatten(2).transpose(1, 2))
        return found.transpose(1, 2).unflatten(2, x.shape[2:])


class Outputs(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


LAYERS = {
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
    "transposed": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
    "group norm": lambda: nn.GroupNorm(4, CHANNELS),
    "instance norm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "layer norm": lambda: nn.LayerNorm([SIDE, SIDE]),
    "linear": lambda: nn.Linear(SIDE, SIDE),
    "wide linear": lambda: Turned(nn.Linear(CHANNELS, CHANNELS)),
    "attention": lambda: Turned(nn.TransformerEncoderLayer(CHANNELS, 2, 32, 0.0, batch_first=True)),
    "largest": lambda: nn.MaxPool2d(3, 1, 1),
    "scale": lambda: nn.PReLU(CHANNELS),
    "recurrent": lambda: Turned(Outputs(nn.GRU(CHANNELS, CHANNELS, batch_first=True))),
    "recurrent, plain": lambda: Turned(Outputs(nn.RNN(CHANNELS, CHANNELS, batch_first=True))),
}


class Words(nn.Module):
    """Words, of which something is changed in place on the way."""

    def __init__(self, change) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.layer, self.out, self.change = nn.Linear(8, 8), nn.Linear(48, 3), change

    def forward(self, x):
        x = self.change(self, self.words(x))
        return self.out(x.reshape(len(x), -1))


CHANGES = {
    "words": lambda model, x: model.layer(x.mul_(2.0)),
    "places": lambda model, x: model.layer(x.add_(model.places)),
    "a layer": lambda model, x: model.layer(x).relu_(),
    "a part of a layer": lambda model, x: model.layer(x).index_fill_(1, torch.tensor([0]), 0.0),
    "a view of a layer": lambda model, x: model.layer(x).transpose(1, 2).relu_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_words_may_be_changed(name, monkeypatch):
    monkeypatch.setattr(alone.log, "warning", lambda *_: pytest.fail("one example at a time"))
    torch.manual_seed(1)
    model, x, y = Words(CHANGES[name]), torch.randint(50, (7, 6)), torch.randint(3, (7,))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    assert_same(clipped_sum(model, criterion, (x, y), clip=0.5), loop(model, criterion, (x, y), 0.5), tolerance=1e-5)


class Doubled(nn.Module):
    """Changes what it is given."""

    def forward(self, x):
        x += 0.5
        return x.mul_(2.0).relu_()


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_made_may_be_changed(name, first):
    torch.manual_seed(1)
    before = [] if first else [nn.Conv2d(CHANNELS, CHANNELS, 1)]
    head = [nn.Flatten(), nn.Linear(CHANNELS * SIDE**2, 5)]
    model = nn.Sequential(*before, LAYERS[name](), Doubled(), *head)
    x, y = torch.randn(N, CHANNELS, SIDE, SIDE), torch.randint(5, (N,))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    found = clipped_sum(model, criterion, (x, y), clip=0.5)
    assert_same(found, loop(copy.deepcopy(model).double(), criterion, (x.double(), y), 0.5), tolerance=2e-4)


def test_a_mended_residual_network_trains_in_a_loop():
    torch.manual_seed(1)
    block = [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    model = sgd.fix(nn.Sequential(*block, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 3)))
    data = torch.randn(32, 8, 12, 12), torch.randint(3, (32,))
    run_loop(model, data, whole_lots(32, steps=3, noise=1.0))
    assert all(torch.isfinite(one).all() for one in model.parameters())
