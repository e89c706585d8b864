"""The validator names every offender; fix replaces what has a standard replacement."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.mixing_layers import fix, validate


def broken() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 48, 3),
        nn.BatchNorm2d(48),
        nn.Sequential(nn.InstanceNorm2d(48, track_running_stats=True), nn.BatchNorm2d(48, affine=False)),
    )


def test_all_offenders_are_in_one_error_by_path():
    with pytest.raises(InvalidArgument) as caught:
        validate(broken())
    message = str(caught.value)
    assert all(word in message for word in ("1: BatchNorm2d", "2.0: InstanceNorm2d", "2.1: BatchNorm2d", "sgd.fix"))
    assert "\n" not in message


@pytest.mark.parametrize(
    "module",
    [nn.Embedding(5, 3, max_norm=1.0), nn.Embedding(5, 3, scale_grad_by_freq=True), nn.EmbeddingBag(5, 3, sparse=True)],
)
def test_tables_that_reach_around_clipping(module):
    with pytest.raises(InvalidArgument):
        validate(module)
    validate(fix(module))


def test_a_module_of_two_names_is_replaced_under_both_and_stays_one():
    norm = nn.BatchNorm1d(4)
    model = fix(nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Sequential(norm)))
    validate(model)
    assert isinstance(model[1], nn.GroupNorm)
    assert model[1] is model[3][0]


def test_functional_batch_statistics_are_refused_when_they_run():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x):
            return nn.functional.batch_norm(self.linear(x), None, None, training=True)

    with pytest.raises(InvalidArgument, match="mixes"):
        clipped_sum(Hidden(), nn.CrossEntropyLoss(), (torch.randn(4, 3), torch.randint(4, (4,))), clip=1.0)


def test_frozen_statistics_are_no_mixing():
    model = nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False).eval(), nn.Linear(3, 4))
    validate(model)
    model.train()
    with pytest.raises(InvalidArgument):
        validate(model)


def test_fix_replaces_says_so_and_leaves_the_original(caplog):
    model = broken()
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        fixed = fix(model)
    validate(fixed)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1].num_groups == 16
    assert torch.equal(fixed[1].weight, model[1].weight)
    assert len(caplog.records) == 3
    assert fixed(torch.randn(2, 3, 8, 8)).shape == (2, 48, 6, 6)


def test_what_is_sound_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    validate(model)
    assert str(fix(model)) == str(model)
