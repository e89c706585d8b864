"""Noise relative to a bound of 1e-38 left single precision: the sign of every clipped sum came out, without noise."""

import math

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument
from terrine.events import Budget


@pytest.mark.parametrize("bound", [1e-38, 1e-300, 5e-324, 1e-13, 1e13, 1e300])
@pytest.mark.parametrize(
    "clip",
    [
        lambda bound: bound,
        lambda bound: sgd.PerLayer({"": bound}),
        lambda bound: sgd.Automatic(bound),
        lambda bound: sgd.Automatic(1.0, stability=bound),
        lambda bound: sgd.Adaptive(initial=bound),
        lambda bound: sgd.Adaptive(noise=bound),
    ],
    ids=["flat", "layers", "automatic", "stability", "adaptive", "count"],
)
def test_bounds_that_single_precision_cannot_hide_are_refused(clip, bound):
    with pytest.raises(InvalidArgument, match="between 1e-12"):
        sgd.Plan(examples=40, lot=40, steps=1, clip=clip(bound), budget=Budget(0.5, 1e-5))


@pytest.mark.parametrize("stages", ["clip_stages", "noise_stages"])
def test_so_are_stages_that_lead_there(stages):
    with pytest.raises(InvalidArgument, match="between 1e-12"):
        sgd.Plan(examples=40, lot=40, steps=3, clip=1.0, noise=1.0, delta=1e-5, **{stages: sgd.Stages(1.0, 1e-38)})


def test_the_smallest_bound_has_its_noise():
    model = nn.Linear(3, 2)
    plan = sgd.Plan(examples=4, lot=4, steps=1, clip=1e-12, noise=1e-3, delta=1e-5)
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in sgd.private_steps(model, optimizer, (x, y), plan, loss=nn.CrossEntropyLoss()):
        assert all(torch.isfinite(gradient).all() for gradient in step.gradients)
        assert step.gradient_norm > 0


@pytest.mark.parametrize("deviation", [1e-38, 1e38, math.inf])
def test_noise_itself_refuses_what_it_cannot_hide(deviation):
    with pytest.raises(InvalidArgument, match="deviation"):
        Key.seeded(0).draw(Purpose.NOISE, 0).protect(torch.zeros(3), deviation)
