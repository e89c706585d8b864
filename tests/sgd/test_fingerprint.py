"""One fingerprint for what was made alike, whatever process made it; another for what was not."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from terrine.sgd import fingerprint

NAMES = {"b": 1, "a": (1, 2.5), frozenset({"x", "y"}): {"p", "q"}}


class Config:
    """As those of large libraries: what it hides is no setting."""

    def __init__(self):
        self.width = 3
        self._hash = hash("text")


class Configured(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.config, self.names = Config(), {"s", "t"}


def judged(output, target, *, weights=None):
    return nn.functional.cross_entropy(output, target) * NAMES["b"] if target in {"u", "v"} else weights


def prints():
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), max_lr=1.0, total_steps=10
    )
    return [
        fingerprint.of_value(judged),
        fingerprint.of_value(functools.partial(judged, weights={"k": np.arange(3)})),
        fingerprint.of_value(schedule),
        fingerprint.of_value(nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))),
        fingerprint.of_model(Configured()),
        fingerprint.of_model(nn.TransformerEncoderLayer(8, 2, 16)),
        fingerprint.of_optimizer(torch.optim.Adam(Configured().parameters()), Configured()),
    ]


def test_another_process_finds_the_same():
    """Hashes of text differ from process to process, and with them the order of sets."""
    command = [sys.executable, "-c", "from tests.sgd.test_fingerprint import prints; print(prints())"]
    for seed in ("1", "2"):
        given = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
        assert done.stdout == f"{prints()}\n"


def test_what_points_back_to_itself_has_an_end():
    class Loop:
        def __call__(self, output, target):
            return output

    loop, other = Loop(), []
    loop.own, loop.list = loop, other
    other.append(other)
    assert fingerprint.of_value(loop) == fingerprint.of_value(loop)


@pytest.mark.parametrize(
    "value",
    [
        None, 1, 1.5, "text", b"bytes", [1, [2]], {"a": 1}, {1, 2}, np.float32(2), np.array(["o"], dtype=object),
        torch.ones(2, dtype=torch.bfloat16), torch.eye(3).to_sparse(), torch.tensor(1.0), torch.empty(0),
        torch.float32, len, np, print, torch.Generator(), np.random.default_rng(0), open, nn.Linear, judged,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_has_one_and_it_is_its_own(value):
    found = fingerprint.of_value(value)
    assert found == fingerprint.of_value(value)
    assert found != fingerprint.of_value([value])


def test_of_a_very_large_tensor_some_numbers_stand_for_all():
    large = torch.zeros(2**22 + 1)
    found = fingerprint.of_value(large)
    large[0] = 1
    assert fingerprint.of_value(large) != found
