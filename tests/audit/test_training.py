"""Audits that train: shadows, white-box attacks, canaries inside a private run."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from terrine import audit, sgd
from terrine.audit import attacks, canaries, lira, shadows, whitebox
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.pate.stacked import Recipe

CROSS_ENTROPY = nn.functional.cross_entropy


def cloud(examples: int, features: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with random labels: whatever is learned is learned by heart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, features, generator=generator)
    return x, torch.randint(0, 3, (examples,), generator=generator)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


@pytest.fixture(scope="module")
def trained() -> tuple[shadows.Shadows, torch.Tensor, torch.Tensor]:
    x, y = cloud(100)
    return shadows.train(build, x, y, models=8, recipe=Recipe(epochs=60, batch=25, learning_rate=1e-2)), x, y


def test_shadows_learn_their_halves_by_heart(trained: tuple[shadows.Shadows, torch.Tensor, torch.Tensor]) -> None:
    found, x, y = trained
    assert found.included.shape == (8, 100)
    assert (found.included.sum(axis=0) == 4).all()
    right = found.logits(x).argmax(-1) == y.numpy()
    assert right[found.included].mean() > 0.95 > 0.6 > right[~found.included].mean()


def test_lira_on_shadows(trained: tuple[shadows.Shadows, torch.Tensor, torch.Tensor]) -> None:
    found, x, y = trained
    scores, truth = lira.leave_one_out(found.confidences(x, y), found.included)
    area = audit.roc(audit.Scores.split(scores.ravel(), truth.ravel())).auc()
    assert area > 0.9
    views = found.confidences([x, x + 0.01], y)
    assert views.shape == (8, 100, 2)
    assert views[..., 0] == pytest.approx(found.confidences(x, y))


def test_views_of_images_are_shifts() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    views = shadows.shifted_views(x)
    assert len(views) == 5
    assert torch.equal(views[0], x)
    assert torch.equal(views[1][0, 0, 1:], x[0, 0, :-1])
    assert (views[1][0, 0, 0] == 0).all()


def test_odd_numbers_of_shadows_are_refused() -> None:
    x, y = cloud(10)
    with pytest.raises(InvalidArgument, match="even number"):
        shadows.train(build, x, y, models=3)
    with pytest.raises(InvalidArgument, match="9 labels"):
        shadows.train(build, x, y[:9], models=2)


def test_gradient_norms_are_those_of_single_examples(
    trained: tuple[shadows.Shadows, torch.Tensor, torch.Tensor],
) -> None:
    found, x, y = trained
    model = found.stack.model(0)
    for one in model.parameters():
        one.requires_grad_(True)
    norms = -whitebox.gradient_norm(model, CROSS_ENTROPY, x, y, chunk=32)
    for place in (0, 50, 99):
        gradients = torch.autograd.grad(
            CROSS_ENTROPY(model(x[place : place + 1]), y[place : place + 1]), list(model.parameters())
        )
        assert norms[place] == pytest.approx(float(torch.cat([one.flatten() for one in gradients]).norm()), rel=1e-4)
    area = audit.roc(audit.Scores.split(-norms, found.included[0])).auc()
    assert area > 0.85


def test_alignment_is_the_inner_product_with_the_update() -> None:
    x, y = cloud(6)
    before = build()
    after = copy.deepcopy(before)
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    CROSS_ENTROPY(after(x[:3]), y[:3]).backward()
    optimizer.step()
    found = whitebox.alignment(before, after, CROSS_ENTROPY, x, y)
    for place in range(6):
        gradients = torch.autograd.grad(
            CROSS_ENTROPY(before(x[place : place + 1]), y[place : place + 1]), list(before.parameters())
        )
        pairs = zip(gradients, before.parameters(), after.parameters(), strict=True)
        assert found[place] == pytest.approx(
            sum(float(((b - a) * g).sum().detach()) for g, b, a in pairs), rel=1e-3, abs=1e-6
        )
    assert found[:3].mean() > found[3:].mean()
    with pytest.raises(InvalidArgument, match="different shapes"):
        whitebox.alignment(before, nn.Linear(20, 3), CROSS_ENTROPY, x, y)


def private_run(noise: float, *, microbatch: int | None = None, count: int = 400, steps: int = 10) -> canaries.Canaries:
    x, y = cloud(200)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 3))  # wide: canaries stand out of the data
    plan = sgd.Plan(examples=200, lot=50, clip=1.0, steps=steps, noise=noise, delta=1e-5, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = sgd.private_steps(model, optimizer, (x, y), plan, loss=CROSS_ENTROPY, microbatch=microbatch)
    inserted = canaries.Canaries.insert(private, count=count, seed=4)
    for _ in private:
        optimizer.step()
    return inserted


def test_canaries_in_a_run_without_noise_are_found() -> None:
    """Each is drawn with chance 1/4 in 20 lots: 99.7% of those in are seen at least once."""
    found = private_run(noise=0.0, steps=20)
    assert audit.roc(audit.Scores.split(found.scores, found.included)).auc() > 0.97
    assert found.evidence(confidence=0.99).epsilon_at(1e-5) > 2


def test_canaries_are_consistent_with_a_correct_run() -> None:
    found = private_run(noise=4.0)
    claim = sgd.Plan(examples=200, lot=50, clip=1.0, steps=10, noise=4.0, delta=1e-5).event
    assert not audit.verdict(claim, found.evidence(confidence=0.999)).violated
    little = private_run(noise=0.2)
    assert audit.roc(audit.Scores.split(little.scores, little.included)).auc() > 0.8


def test_canaries_weigh_what_an_example_weighs() -> None:
    """Without noise a score counts the lots that held the canary: Binomial(20, 1/4) for those in, 0 for the others."""
    found = private_run(noise=0.0, steps=20)
    assert found.scores == pytest.approx(found.scores.round(), abs=1e-3)
    assert found.scores[~found.included] == pytest.approx(0, abs=1e-3)
    drawn = found.scores[found.included]
    assert drawn.mean() == pytest.approx(20 / 4, abs=5 * math.sqrt(20 * 3 / 16 / drawn.size))


def test_microbatches_hold_each_canary_once() -> None:
    whole, parts = private_run(noise=0.0), private_run(noise=0.0, microbatch=20)
    assert parts.scores == pytest.approx(whole.scores, abs=1e-4)


@pytest.mark.parametrize(
    "clip", [1.0, sgd.PerLayer({"0": 1.0, "2": 0.5}), sgd.Adaptive(initial=1.0)], ids=["flat", "layers", "adaptive"]
)
def test_canaries_in_a_trainer(clip: object) -> None:
    x, y = cloud(200)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 3))
    plan = sgd.Plan(examples=200, lot=50, clip=clip, steps=20, noise=0.05, delta=1e-5, seed=3)  # type: ignore[arg-type]
    trainer = sgd.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), CROSS_ENTROPY, plan)
    history, found = canaries.Canaries.fit(trainer, (x, y), count=400, seed=4)
    assert history.steps == 20
    assert audit.roc(audit.Scores.split(found.scores, found.included)).auc() > 0.95
    assert found.evidence().epsilon_at(1e-5) > 1


def test_canaries_that_cannot_be_are_refused() -> None:
    x, y = cloud(20)

    def lots(**options: object) -> object:
        model = build()
        plan = sgd.Plan(examples=20, lot=5, clip=1.0, epochs=1, noise=1.0, delta=1e-5, seed=0, **options)  # type: ignore[arg-type]
        return sgd.private_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), plan, loss=CROSS_ENTROPY)

    with pytest.raises(InvalidArgument, match="one to a coordinate"):
        canaries.Canaries.insert(lots(), count=10_000)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="want Poisson lots"):
        canaries.Canaries.insert(lots(sampling=sgd.Shuffled()), count=10)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="one flag"):
        canaries.Canaries.insert(lots(), count=10, included=np.ones(3, dtype=bool))  # type: ignore[arg-type]
    fresh = canaries.Canaries.insert(lots(), count=10)  # type: ignore[arg-type]
    with pytest.raises(OutOfOrder, match="no step was taken"):
        fresh.evidence()


def test_mislabelled_canaries_have_wrong_labels() -> None:
    _, y = cloud(100)
    chosen = np.arange(0, 100, 3)
    changed = canaries.mislabelled(y, canaries=chosen, classes=3)
    different = (changed != y).numpy()
    assert different[chosen].all()
    assert different.sum() == chosen.size
    assert 0 <= changed.min() <= changed.max() < 3


def test_loss_of_mislabelled_canaries_tells_who_was_in() -> None:
    x, y = cloud(120)
    included = np.random.default_rng(0).random(120) < 0.5
    inside = torch.from_numpy(np.flatnonzero(included))
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        CROSS_ENTROPY(model(x[inside]), y[inside]).backward()
        optimizer.step()
    scores = attacks.loss(model(x).detach().numpy(), y.numpy())
    assert audit.one_run.guess(scores, included).epsilon_at(1e-5) > 1
