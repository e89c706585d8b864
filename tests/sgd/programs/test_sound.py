"""Sound programs are accepted, and their clipped sums are those of the slow obvious way."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 as everybody writes it

from terrine import sgd
from terrine.errors import TerrineError
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


def with_a_failing_example(parts: helpers.Parts) -> tuple[Any, Any]:
    """The same program and batch, and one example more, for which the program raises wherever it runs."""
    index = torch.zeros(helpers.length(parts.batch), dtype=torch.long)
    extra = helpers.example(parts.batch, 0)
    batch = {
        "given": helpers.insert(parts.batch, extra, 4),
        "index": helpers.insert(index, torch.full((1,), 9), 4),
    }

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        failing = torch.ones(3)[batch["index"]].sum()
        return helpers.call(parts.loss, model, batch["given"]).sum() + 0 * failing

    return loss, batch


@pytest.mark.parametrize("name", SOUND)
def test_one_example_that_fails_adds_nothing_and_moves_no_other(name: str) -> None:
    parts = helpers.build(SOUND[name])
    options = helpers.shared_options(parts)
    try:
        plain = sgd.clipped_sum(parts.model, parts.loss, parts.batch, clip=CLIP, **options)
    except TerrineError:
        pytest.skip("refused, which the tests above say")
    parts = helpers.build(SOUND[name])
    loss, batch = with_a_failing_example(parts)
    joined = sgd.clipped_sum(parts.model, loss, batch, clip=CLIP, **options)
    if parts.random:
        assert helpers.flat(joined.sums).norm() <= CLIP * len(plain.norms) * helpers.SLACK
        return
    moved = (helpers.flat(joined.sums) - helpers.flat(plain.sums)).norm()
    assert moved <= CLIP * max(parts.tolerance, 1e-8), (
        f"one example that fails moves the others by {moved / CLIP:.3g} C"
    )


@pytest.mark.parametrize("module", ["random", "numpy"])
@pytest.mark.parametrize("reason", ["fails", "divides"])
def test_augmentation_by_a_coin_of_pythons_is_drawn_for_every_example(module: str, reason: str) -> None:
    """Were one coin shared by all examples, one that fails, or goes its own way, would change how all are drawn."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, index = batch
        heads = random.random() < 0.5 if module == "random" else np.random.rand() < 0.5
        sign = 1.0 if heads else -1.0
        if reason == "fails":
            return sign * model(x).sum() + 0 * torch.ones(3)[index].sum()
        return sign * model(x).sum() if index.sum() < 5 else 0 * model(x).sum()

    def shares(extra: int) -> list[float]:
        """How far the sum of equal examples goes, in examples, for a few seeds."""
        found = []
        for seed in range(12):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            index = torch.tensor([0] * 32 + [9] * extra)
            clipped = sgd.clipped_sum(nn.Linear(2, 1), loss, (torch.ones(32 + extra, 2), index), clip=1.0)
            found.append(float(helpers.flat(clipped.sums).norm()))
        return found

    try:
        without, with_it = max(shares(0)), max(shares(1))
    except TerrineError as error:
        if not helpers.is_one_line(str(error)):
            pytest.fail(f"not one line: {error}")
        return
    assert without < 28, (
        f"one coin for all examples: sums of {without:.3g} C of 32, and {with_it:.3g} C where one {reason}"
    )
    assert abs(without - with_it) < 20


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_half_precision_of_many_equal_examples_does_not_hang_on_one_that_fails(precision: str) -> None:
    """Hundreds of aligned examples: what is rounded alike in all of them adds up, so both ways must round alike."""
    torch.set_default_dtype(torch.float32)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, index = batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
            value = F.cross_entropy(model(x), y)
        return value + 0 * torch.ones(3)[index].sum()

    def total(extra: int) -> torch.Tensor:
        helpers.seed_all()
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        x = torch.linspace(-1.7, 1.3, 6).expand(512 + extra, 6)
        index = torch.tensor([0] * 512 + [9] * extra)
        options = {} if precision == "autocast" else {"precision": "bf16"}
        batch = (x, torch.zeros(len(x), dtype=torch.long), index)
        return helpers.flat(sgd.clipped_sum(model, loss, batch, clip=CLIP, **options).sums)

    moved = float((total(1) - total(0)).norm())
    assert moved <= CLIP * helpers.SLACK, f"one example that fails moves the others by {moved / CLIP:.3g} C"
