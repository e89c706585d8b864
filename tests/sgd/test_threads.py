"""Threads of our own: failures are heard, and torch keeps its own number; wide inputs by blocks for one thread."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from terrine.sgd.clipping import clipped_sum
from terrine.sgd.clipping.contribution import Outer
from terrine.sgd.threads import spread

ROWS, WIDTH = 600, 7_001  # enough numbers for the way by blocks, and not a multiple of anything


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_torch_is_serial_within_and_as_before_outside(threads):
    seen = []
    meet = threading.Barrier(threads)

    def work():
        meet.wait()  # nobody does two works
        seen.append(torch.get_num_threads())

    spread([work] * threads)
    assert seen == [1] * threads
    assert torch.get_num_threads() == threads


def test_a_work_that_fails_is_heard_after_all_are_done(threads):
    done = []
    with pytest.raises(ZeroDivisionError):
        spread([lambda: 1 / 0, *[partial(done.append, 1)] * (threads - 1)])
    assert len(done) == threads - 1


@pytest.mark.parametrize("fresh", [True, False])
def test_a_wide_skinny_sum_is_the_product(threads, fresh):
    inputs, gradients, factor = torch.randn(ROWS, 1, WIDTH), torch.randn(ROWS, 1, 3), torch.rand(ROWS)
    total = torch.full((3, WIDTH), torch.nan if fresh else 1.0)
    Outer(inputs, gradients, (3, WIDTH)).add_to(total, factor, fresh)
    expected = (gradients[:, 0] * factor[:, None]).double().t() @ inputs[:, 0].double() + float(not fresh)
    assert torch.allclose(total.double(), expected, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_fixed_wide_features_are_clipped_as_in_float64(threads, bias):
    torch.manual_seed(threads)
    model, x, y = nn.Linear(WIDTH, 3, bias=bias), torch.randn(ROWS, WIDTH), torch.randint(3, (ROWS,))
    found = clipped_sum(model, nn.CrossEntropyLoss(), x, y, clip=66.0, chunk=ROWS)
    exact = clipped_sum(model.double(), nn.CrossEntropyLoss(), x.double(), y, clip=66.0, chunk=7)
    assert torch.allclose(found.norms.double(), exact.norms, rtol=1e-5)
    assert 0 < (exact.norms > 66.0).sum() < ROWS
    for name, total in exact.sums.items():
        assert torch.allclose(found.sums[name].double(), total, atol=1e-4)
