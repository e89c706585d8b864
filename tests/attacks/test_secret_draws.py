"""Dropout masks are by place in the lot: a seed at the top of a script must not make them public. Nor may a fork."""

import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import OutOfOrder


def plan(**more):
    return sgd.Plan(examples=16, lot=16, steps=2, clip=1.0, noise=0.0, delta=1e-5, **more)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator), torch.arange(16) % 3


def trained(**more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    start = [one.detach().clone() for one in model.parameters()]
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan(**more))
    torch.manual_seed(0)
    for x, y in lots:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return start, [one.detach() for one in model.parameters()]


def test_masks_do_not_come_from_the_callers_seed():
    (start, one), (same, other) = trained(), trained()
    assert all(map(torch.equal, start, same))
    assert not all(map(torch.equal, one, other))


def test_a_seeded_plan_draws_the_same():
    assert all(map(torch.equal, trained(seed=5)[1], trained(seed=5)[1]))


def test_the_callers_random_numbers_go_on_as_if_nothing_had_been_drawn():
    def after(run):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
        model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan())
        found = []
        for x, y in lots if run else ():
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            found.append(float(torch.rand(())))  # after the step they are the caller's
        return [*found[:1], float(torch.rand(())), np.random.rand(), random.random()]

    first, *rest = after(True)
    torch.manual_seed(3)
    nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    assert first == float(torch.rand(()))
    assert rest[1:] == after(False)[1:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this machine")
def test_a_fork_of_a_run_takes_no_step():
    model = nn.Linear(4, 3)
    model, optimizer, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan())
    x, y = next(iter(lots))
    functional.cross_entropy(model(x), y).backward()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        told = b"stepped"
        try:
            optimizer.step()
        except OutOfOrder as refused:
            told = str(refused).encode()
        os.write(writing, told)
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(reading, 1000)
    optimizer.step()
