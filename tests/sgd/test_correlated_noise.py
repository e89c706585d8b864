"""Correlated noise in a run: what is drawn, kept, said, skipped and made again."""

import logging
import math

import numpy as np
import pytest
import torch
from scipy.linalg import solve_triangular, toeplitz
from scipy.stats import norm
from torch import nn

from terrine import sgd
from terrine.common.correlated import CorrelatedNoise
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.optimizers import CorrectedAdam

from .helpers import Notes, each_turn

SHARED = {"examples": 12, "lot": 3, "clip": 0.5, "noise": 1.0, "delta": 1e-5, "steps": 12, "seed": 4}


def plan(bands=4, **changes):
    correlated = None if bands is None else sgd.Banded(bands)
    return sgd.Plan(**{**SHARED, "correlated": correlated, **changes})


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data():
    generator = torch.Generator().manual_seed(3)
    return 4 * torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def released(settings, *, rate=0.1, stop=None, make=torch.optim.SGD, **options):
    """The gradients of every step that was released, by step, and the model."""
    trained, found = model(), {}
    optimizer = make(trained.parameters(), lr=rate)
    steps = sgd.private_steps(trained, optimizer, data(), settings, loss=nn.CrossEntropyLoss(), **options)
    for step in steps:
        found[step.number - 1] = torch.cat([one.flatten() for one in step.gradients])
        optimizer.step()
        if step.number == stop:
            steps.close()
            break
    return found, trained


def matrix(banded, steps):
    column = np.zeros(steps)
    column[: banded.bands] = banded.coefficients
    return np.tril(toeplitz(column)) / banded.sensitivity


def noise(banded, steps, size, seed=1):
    """(steps, size) vectors of noise for z of deviation 1."""
    source = CorrelatedNoise(banded, Key.seeded(seed), [torch.zeros(size - 3), torch.zeros(3)])
    return np.stack([torch.cat(source.at(step)).double().numpy() for step in range(steps)])


# --- the noise itself ----------------------------------------------------------------------------------------------


def farthest(y, c):
    """The largest z-score of a second moment of C y, whose numbers should be independent and of variance 1."""
    z = c @ y
    moments = z @ z.T / z.shape[1]
    scores = (moments - np.eye(len(c))) * math.sqrt(z.shape[1]) / np.sqrt(1 + np.eye(len(c)))
    return np.abs(scores[np.tril_indices(len(c))]).max()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_covariance_is_that_of_the_inverse(momentum):
    """False alarms 1e-4 over the choice of the seed, which is fixed; a coefficient that is 5% off must be noticed."""
    steps, size = 12, 200_000
    banded = sgd.Banded(4, momentum).settled(steps)
    limit = norm.isf(1e-4 / 2 / (steps * (steps + 1) / 2))
    y = noise(banded, steps, size)
    assert farthest(y, matrix(banded, steps)) < limit
    expected = np.linalg.inv(matrix(banded, steps))
    assert np.allclose(y @ y.T / size, expected @ expected.T, atol=0.05 * (expected @ expected.T).max())
    for place in range(1, 4):
        wrong = list(banded.coefficients)
        wrong[place] *= 1.05
        assert farthest(y, matrix(sgd.Banded(4, momentum, coefficients=tuple(wrong)), steps)) > limit
    assert farthest(1.01 * y, matrix(banded, steps)) > limit


@pytest.mark.parametrize("bands", [2, 3, 10])
def test_forward_substitution_does_not_pile_up_rounding(bands):
    """3,000 steps in float32 against a triangular solve in float64."""
    steps, size = 3000, 8
    banded = sgd.Banded(bands).settled(steps)
    z = np.stack([Key.seeded(1).draw(Purpose.NOISE, step).normal(size).double().numpy() for step in range(steps)])
    exact = solve_triangular(matrix(banded, steps), z, lower=True)
    assert np.abs(noise(banded, steps, size) - exact).max() < 2e-5


def test_steps_that_are_left_out_have_noise_of_their_own():
    banded = sgd.Banded(4).settled(20)
    whole = noise(banded, 20, 50)
    source = CorrelatedNoise(banded, Key.seeded(1), [torch.zeros(50)])
    for step in (0, 1, 5, 6, 19):
        assert np.array_equal(source.at(step)[0].double().numpy(), whole[step])
    with pytest.raises(OutOfOrder, match="step 20 was used"):
        source.at(19)


def test_the_sum_is_rounded_to_a_public_grid():
    banded = sgd.Banded(3).settled(8)
    source, expected = (CorrelatedNoise(banded, Key.seeded(2), [torch.zeros(1000)]) for _ in range(2))
    for step in range(8):
        total = torch.linspace(-3, 3, 1000)
        exact = total.double() + 0.7 * expected.at(step)[0].double()
        source.protect([total], step, 0.7)
        grid = 2.0 ** (math.floor(math.log2(0.7 * banded.sensitivity)) - 10)
        assert torch.equal((total / grid).round() * grid, total)
        assert (total - exact).abs().max() <= 0.51 * grid


@pytest.mark.parametrize("scale", [1.0, 0.95])
def test_the_best_attack_finds_what_is_charged(scale):
    """An example against its opposite, in the first lot of two epochs: the best statistic is C x along C g.

    Shifts in deviations against those of the event; false alarms 1e-5. Noise that is 5% too small must be noticed.
    """
    steps, size = 8, 200_000
    made = plan(examples=8, lot=2, steps=steps, noise=2.0, sampling=sgd.Shuffled(), clip=0.5)
    c, scores = matrix(made.correlated, steps), []
    for seed, gradient in ((1, 0.5), (2, -0.5)):
        source = CorrelatedNoise(made.correlated, Key.seeded(seed), [torch.zeros(size)])
        released_sums = np.zeros((steps, size))
        for step in range(steps):
            total = torch.full((size,), gradient if step % 4 == 0 else 0.0)
            source.protect([total], step, scale * made.deviation_at(step, 0.5))
            released_sums[step] = total.double().numpy()
        scores.append(c[:, [0, 4]].sum(axis=1) @ (c @ released_sums))
    found = (scores[0].mean() - scores[1].mean()) / scores[1].std()
    error = norm.isf(5e-6) * math.sqrt(2 / size + (1 / made.event.event.noise) ** 2 / (2 * size))
    assert (abs(found - 1 / made.event.event.noise) <= error) == (scale == 1.0)


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [sgd.Poisson(), sgd.Shuffled(), sgd.FixedSize()])
@pytest.mark.parametrize("make", [torch.optim.SGD, CorrectedAdam])
def test_one_band_is_dp_sgd_bit_for_bit(sampling, make):
    ours, _ = released(plan(1, sampling=sampling), make=make)
    plain, _ = released(plan(None, sampling=sampling), make=make)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[step], plain[step]) for step in plain)


@pytest.mark.parametrize("sampling", [sgd.Poisson(), sgd.Shuffled()])
def test_a_run_releases_clipped_sums_plus_the_plan_s_noise(sampling):
    """Rate 0: the gradients of a run with noise, less those of one with almost none, are the noise."""
    settings = plan(sampling=sampling)
    noisy, _ = released(settings, rate=0.0)
    quiet, _ = released(plan(sampling=sampling, noise=1e-6, delta=1e-5), rate=0.0)
    size = sum(one.numel() for one in model().parameters())
    source = CorrelatedNoise(settings.correlated, Key.seeded(4), [torch.zeros(size)])
    for step in range(12):
        made = settings.deviation_at(step, 0.5) / 3 * source.at(step)[0]
        assert torch.allclose(noisy[step] - quiet[step], made, atol=2e-3)


def test_the_memory_is_said_before_training_starts(caplog):
    trained, size = model(), sum(one.numel() for one in model().parameters())
    with caplog.at_level(logging.WARNING, logger="terrine.sgd"):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        steps = sgd.private_steps(trained, optimizer, data(), plan(), loss=nn.CrossEntropyLoss())
    assert f"keeps 3 vectors of {size} numbers" in caplog.text
    assert steps.number == 0
    caplog.clear()
    released(plan(1))
    assert "vectors" not in caplog.text


def test_a_plan_without_noise_keeps_none():
    quiet, _ = released(plan(noise=0.0), rate=0.0)
    plain, _ = released(plan(None, noise=0.0, sampling=sgd.CyclicPoisson(4)), rate=0.0)
    assert all(torch.equal(quiet[step], plain[step]) for step in plain)


def variances(settings, steps):
    """Of each step's noise, on the average gradient: rows of the inverse, from the block's own beginning."""
    inverse = np.linalg.inv(matrix(settings.correlated, steps))
    return (inverse**2).sum(axis=1) * (settings.deviation_at(0, 0.5) / 3) ** 2


def test_corrected_adam_takes_out_the_variance_of_correlated_noise():
    steps, settings = 12, plan(seed=5)
    expected = variances(settings, steps)
    assert expected[-1] > 1.05 * expected[0]
    trained = model()
    optimizer = CorrectedAdam(trained.parameters(), lr=0.01)
    for turn in each_turn(trained, data(), settings, optimizer=optimizer):
        step = turn.step.number - 1
        assert optimizer.param_groups[0]["noise_variance"] == pytest.approx(expected[step])
        weights = 0.999 ** np.arange(step, -1, -1)
        taken = optimizer.state[trained[0].weight]["noise"] / (1 - 0.999 ** (step + 1))
        assert taken == pytest.approx(weights @ expected[: step + 1] / weights.sum())


# --- a run that was broken off: a new block, whose noise owes nothing to what was released before -----------------


@pytest.mark.parametrize("sampling", [sgd.Poisson(), sgd.Shuffled()])
@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_run_that_goes_on_begins_a_block_of_its_own(tmp_path, stop, sampling):
    """What is released is C_0^-1 z before the break and C_1^-1 z after it, both from their own first step on."""
    settings, kept = plan(sampling=sampling), tmp_path / "run.pt"
    first, _ = released(settings, rate=0.0, stop=stop, checkpoint=kept)
    rest, _ = released(settings, rate=0.0, checkpoint=kept)
    assert sorted({**first, **rest}) == list(range(12))
    quiet, _ = released(plan(sampling=sampling, noise=1e-6), rate=0.0)
    size = sum(one.numel() for one in model().parameters())
    whole, block = (
        CorrelatedNoise(settings.correlated, Key.seeded(4), [torch.zeros(size)], first=k) for k in (0, stop)
    )
    for step in range(12):
        noise = whole.at(step)[0] if step < stop else block.at(step)[0]
        released_there = (first if step < stop else rest)[step]
        assert torch.allclose(released_there - quiet[step], settings.deviation_at(step, 0.5) / 3 * noise, atol=2e-3)


def test_turns_of_an_example_stay_apart_over_a_break(tmp_path):
    """Without a seed: noise is fresh, groups and order are those of the run."""
    settings = plan(seed=None, sampling=sgd.Shuffled())
    secrets = []
    for stop in (3, None):
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        steps = sgd.private_steps(
            trained, optimizer, data(), settings, loss=nn.CrossEntropyLoss(), checkpoint=tmp_path / "run.pt"
        )
        secrets.append((steps._lots.secret, steps.release.key.secret))
        for step in steps:
            optimizer.step()
            if step.number == stop:
                steps.close()
                break
    (lots, noise), (same, other) = secrets
    assert lots == same
    assert noise != other


def test_corrected_adam_counts_from_the_new_block(tmp_path):
    settings, kept = plan(), tmp_path / "run.pt"
    released(settings, stop=7, checkpoint=kept, make=CorrectedAdam)
    trained = model()
    optimizer = CorrectedAdam(trained.parameters(), lr=0.1)
    expected = variances(settings, 12)
    for turn in each_turn(trained, data(), settings, optimizer=optimizer, checkpoint=kept):
        assert optimizer.param_groups[0]["noise_variance"] == pytest.approx(expected[turn.step.number - 8])


def test_other_coefficients_are_another_run(tmp_path):
    account, kept = Notes(), tmp_path / "run.pt"
    released(plan(), stop=4, checkpoint=kept, account=account)
    with pytest.raises(InvalidArgument, match="another plan"):
        released(plan(correlated=sgd.Banded.inverse_root(4)), checkpoint=kept, account=account)
    assert len(account.charges) == 1


def test_a_trainer_learns_with_a_fixed_order(digits):
    """Real digits, where no sampling is allowed: correlated noise does better than independent noise."""
    train, test = digits
    scores = {}
    for bands in (1, 10):
        settings = sgd.Plan(
            examples=1500, lot=150, epochs=10, clip=1.0, noise=4.0, delta=1e-4, seed=1,
            sampling=sgd.Shuffled(), correlated=sgd.Banded(bands),
        )  # fmt: skip
        torch.manual_seed(0)
        net = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        trainer = sgd.Trainer(net, optimizer, nn.CrossEntropyLoss(reduction="none"), settings, progress=False)
        assert trainer.fit(train).epsilon == pytest.approx(settings.epsilon)
        scores[bands] = trainer.evaluate(test).accuracy
    assert scores[10] > scores[1] + 0.05
