"""Sound programs are accepted, and their clipped sums are those of the slow obvious way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from terrine import sgd
from tests.sgd.programs import helpers
from tests.sgd.programs.helpers import CLIP
from tests.sgd.programs.sound import SOUND

@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SOUND)
def test_clipped_sum_is_that_of_one_after_the_other(name: str) -> None:
    parts = helpers.build(SOUND[name])
    options = helpers.shared_options(parts)
    clipped = sgd.clipped_sum(parts.model, parts.loss, parts.batch, clip=CLIP, **options)
    sums, norms = clipped.sums, clipped.norms
    assert set(sums) == set(helpers.trained(parts.model))
    assert len(norms) == helpers.length(parts.batch)
    assert helpers.flat(sums).isfinite().all()
    if parts.random:
        assert 0 < helpers.flat(sums).norm() <= CLIP * len(norms) * helpers.SLACK
        return
    slow = helpers.build(SOUND[name])
    expected, lengths = helpers.reference(slow.model, slow.plain or slow.loss, slow.batch, CLIP)
    finite = lengths.isfinite()
    assert finite.any()
    torch.testing.assert_close(
        norms.double()[finite], lengths[finite], rtol=parts.tolerance, atol=parts.tolerance, check_dtype=False
    )
    torch.testing.assert_close(helpers.flat(sums), helpers.flat(expected), rtol=parts.tolerance, atol=parts.tolerance)


@pytest.mark.parametrize("name", SOUND)
def test_private_steps_release_the_same(name: str) -> None:
    parts = helpers.build(SOUND[name])
    trace = helpers.steps_of_run(SOUND[name], parts.batch)
    assert trace.sums
    assert all(released.isfinite().all() for released in trace.sums)
    if parts.random:
        assert 0 < trace.sums[0].norm() <= CLIP * helpers.length(parts.batch) * helpers.SLACK
        return
    if parts.loop is None:
        slow = helpers.build(SOUND[name])
        expected = helpers.flat(helpers.reference(slow.model, slow.plain or slow.loss, slow.batch, CLIP)[0])
        trace.expected = [expected] * len(trace.sums)
    assert len(trace.sums) == 3
    tolerance = max(parts.tolerance, 1e-7)
    for released, expected in zip(trace.sums, trace.expected, strict=True):
        torch.testing.assert_close(released, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SOUND)
def test_each_example_stands_alone(name: str) -> None:
    """The registry itself: the order of the examples is nothing to the reference, and nothing is kept."""
    parts = helpers.build(SOUND[name])
    if parts.random:
        return
    one = helpers.reference(parts.model, parts.plain or parts.loss, parts.batch, CLIP)[0]
    backwards = torch.arange(helpers.length(parts.batch) - 1, -1, -1)
    turned = helpers.pytree.tree_map(lambda rows: rows[backwards], parts.batch)
    other = helpers.reference(parts.model, parts.plain or parts.loss, turned, CLIP)[0]
    assert helpers.flat(one).norm() > 0
    torch.testing.assert_close(helpers.flat(one), helpers.flat(other), rtol=1e-6, atol=1e-6)
