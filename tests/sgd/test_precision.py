"""Norms and sums in single precision, whatever products of single precision are asked to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from terrine.errors import InvalidArgument
from terrine.sgd import devices as precision
from terrine.sgd.clipping import clipped_sum, contribution
from terrine.sgd.clipping.rules import linear

from .helpers import Criterion, distance, flatten, run_loop, whole_lots
from .oracle import assert_same, loop

LAX = [
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
]


@pytest.fixture(params=LAX, ids=["everywhere", "products", "convolutions"])
def lax(request):
    """Products of single precision may be rough, as they were asked to be."""
    kinds = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.cuda.matmul
    before = [kind.fp32_precision for kind in kinds]
    request.param()
    yield
    for kind, value in zip(kinds, before, strict=True):
        kind.fp32_precision = value


def test_it_is_found_out_and_put_back(lax):
    assert not precision.is_exact()
    with precision.exact():
        assert precision.is_exact()
        assert torch.backends.mkldnn.matmul.fp32_precision in precision.EXACT
    assert not precision.is_exact()


def test_rules_and_sums_are_exact_where_products_are_not(lax, monkeypatch):
    """What a rule and a sum are made of is made exactly; the model's own products are the user's affair."""
    seen = []

    def spy(target, name):
        real = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a, **k: (seen.append(precision.is_exact()), real(*a, **k))[1])

    spy(linear, "_linear")
    spy(contribution.Outer, "weighted_sum")
    spy(contribution.Dense, "weighted_sum")
    model, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.randint(3, (4,))
    clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=1.0)
    assert len(seen) >= 3
    assert all(seen)


# -- half precision: the loss may run in it, norms, factors and sums never do ----------------------------------------

CLIP = 0.5
CRITERION = nn.CrossEntropyLoss()
MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (4,)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Flatten(), nn.Linear(40, 3)), (5, 4)),
    "norms": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (4,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)), (2, 6, 6)),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(24, 3)
        ),
        (3, 8),
    ),
}


def half(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return CRITERION(model(batch[0]), batch[1])


def around(model, batch, **options):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return clipped_sum(model, CRITERION, batch, clip=CLIP, **options)


HALF = {
    "around everything": around,
    "precision": lambda model, batch, **options: clipped_sum(
        model, CRITERION, batch, clip=CLIP, precision="bf16", **options
    ),
    "inside the loss": lambda model, batch, **options: clipped_sum(model, half, batch, clip=CLIP, **options),
}


def aligned(name, count):
    """Examples that all push the same way, all beyond the bound."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make(), (3.0 * torch.randn(1, *shape)).expand(count, *shape).contiguous(), torch.zeros(count).long()


@pytest.mark.parametrize("way", HALF)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"microbatch": 1000}], ids=["whole", "microbatches"])
def test_2048_aligned_examples_move_the_sum_by_the_bound_each(name, way, options):
    """The sum is 2,048 bounds long: in bfloat16 its last bit alone would be worth 8 of them."""
    model, x, y = aligned(name, 2049)
    one = HALF[way](model, (x[:1], y[:1]))
    assert float(flatten(one.sums).norm()) == pytest.approx(CLIP, rel=1e-5)
    whole, rest = (HALF[way](model, (x[:count], y[:count]), **options) for count in (2049, 2048))
    assert whole.norms.dtype is torch.float32
    assert all(total.dtype is torch.float32 for total in whole.sums.values())
    exact = {name: 2048 * total.double() for name, total in one.sums.items()}
    assert distance(rest, rest._replace(sums=exact)) <= 2048 * CLIP * 2.0**-14
    assert distance(whole, rest) <= CLIP * (1 + 1e-4)  # single precision's own rounding of a sum of 2,048


@pytest.mark.parametrize("way", HALF)
def test_2048_aligned_examples_to_the_last_bit(way):
    """Where every clipped gradient is a power of two, single precision adds them up without any rounding."""
    model = nn.Linear(1, 1, bias=False)
    loss = Criterion(lambda out, y: out.sum())
    for count in (2047, 2048, 2049):
        batch = torch.full((count, 1), 4.0), torch.zeros(count)
        if way == "around everything":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = clipped_sum(model, loss, batch, clip=CLIP)
        else:
            found = clipped_sum(model, loss, batch, clip=CLIP, precision="bf16")
        assert float(found.sums["weight"]) == count * CLIP


@pytest.mark.parametrize("way", HALF)
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_that_of_clipped_gradients_in_single_precision(name, way):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), (3.0 * torch.randn(16, *shape), torch.arange(16) % 3)
    found, expected = HALF[way](model, batch), loop(model, half, batch, CLIP)
    assert_same(found, expected, 0.05 if name == "attention" else 2e-2)
    norms = flatten(HALF[way](model, tuple(rows[:1] for rows in batch)).sums).norm()
    assert float(norms) <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize("around_it", [False, True])
def test_a_run_in_half_precision_releases_single_precision(around_it):
    model, x, y = aligned("mlp", 2048)
    plan = whole_lots(2048, clip=CLIP)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around_it):
        options = {} if around_it else {"precision": "bf16"}
        (turn,) = run_loop(model, (x, y), plan, **options)
    assert turn.gradient.dtype is torch.float32
    assert float(turn.gradient.norm()) == pytest.approx(CLIP, rel=1e-5)


@pytest.mark.parametrize("precision_", ["fp16", 16, True, "bf32"])
def test_another_precision_is_refused(precision_):
    with pytest.raises(InvalidArgument, match="precision"):
        clipped_sum(
            nn.Linear(4, 3), CRITERION, (torch.randn(4, 4), torch.zeros(4).long()), clip=1.0, precision=precision_
        )
