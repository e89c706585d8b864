"""The validator names every offender; fix replaces what has a standard replacement."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.layers import fix, validate


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


class NormAndActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: batch normalisation, `drop` and `act` in one class."""

    def __init__(self, channels, act):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class NormTwice(NormAndActivation):
    def forward(self, x):
        return 2 * super().forward(x)


def test_fix_keeps_the_activation_of_a_fused_class():
    fixed = fix(nn.Sequential(nn.Conv2d(3, 8, 3), NormAndActivation(8, nn.ReLU(inplace=True))))
    assert [type(part) for part in fixed[1]] == [nn.GroupNorm, nn.ReLU]
    plain = fix(nn.Sequential(nn.Conv2d(3, 8, 3), NormAndActivation(8, nn.Identity())))
    assert type(plain[1]) is nn.GroupNorm


def test_fix_refuses_by_path_what_it_does_not_understand():
    class OwnTable(nn.Embedding):
        pass

    model = nn.Sequential(NormTwice(8, nn.ReLU()), nn.Sequential(NormTwice(4, nn.Tanh())), OwnTable(3, 4, sparse=True))
    with pytest.raises(InvalidArgument, match=r"0: NormTwice .*; 1.0: NormTwice .*; 2: OwnTable"):
        fix(model)
    with pytest.raises(InvalidArgument, match="0: BatchNorm1d of one value"):
        fix(nn.Sequential(nn.BatchNorm1d(1)))


@pytest.mark.parametrize(
    ("norm", "groups"),
    [
        (nn.BatchNorm1d(8), 2),
        (nn.BatchNorm1d(3), 1),
        (nn.BatchNorm1d(256), 32),
        (nn.BatchNorm2d(16), 8),
        (nn.BatchNorm2d(7), 1),
        (nn.BatchNorm2d(64), 32),
    ],
)
def test_fix_makes_no_group_of_one_value(norm, groups):
    fixed = fix(nn.Sequential(norm))[0]
    assert fixed.num_groups == groups
    if isinstance(norm, nn.BatchNorm1d):
        assert fixed(torch.randn(5, norm.num_features)).std(0).min() > 0.1


def test_fix_tries_an_example():
    fix(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)), example=torch.randn(1, 3))
    with pytest.raises(InvalidArgument, match=r"the forward pass of one example fails: .*shape"):
        fix(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)), example=torch.randn(1, 4))
    with pytest.raises(InvalidArgument, match="no output"):
        fix(nn.Linear(3, 8).requires_grad_(False), example=torch.randn(1, 3))
    with pytest.raises(InvalidArgument, match="not finite for weight"):
        fix(nn.Linear(3, 8), example=torch.full((1, 3), float("inf")))
    with pytest.raises(InvalidArgument, match="the backward pass of one example fails"):
        fix(Overwrites(), example=torch.randn(1, 3))


class Overwrites(nn.Linear):
    """Changes in place what its backward pass needs."""

    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        out = super().forward(x).exp()
        return out.mul_(2) if out.requires_grad else out
