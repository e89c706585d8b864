"""Ways in which correlated noise goes wrong, each built on purpose: what guards against it must catch it.

Each check is first run on the real code, where it must pass.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from terrine import sgd
from terrine.common.keys import Key
from terrine.errors import InvalidArgument
from terrine.events import Gaussian

EXAMPLES, LOT, STEPS, BANDS = 12, 3, 8, 4


def plan(**changes):
    given = {"examples": EXAMPLES, "lot": LOT, "steps": STEPS, "clip": 1.0, "noise": 2.0, "delta": 1e-5}
    return sgd.Plan(**{**given, "correlated": sgd.Banded(BANDS), **changes})


def charged(made):
    """How far the event lets one example move C g, in clipping bounds times reach."""
    event = made.event
    return made.noise / event.noise if isinstance(event, Gaussian) else math.sqrt(event.times)


def moved(made, sampling, seed):
    """How far the example that moves C g most can move it, by the lots that were drawn and any signs."""
    banded = made.correlated
    column = np.pad(banded.coefficients, (0, STEPS - banded.bands))
    c = np.tril(toeplitz(column)) / banded.sensitivity
    lots = [sampling.draw(Key.seeded(seed), step, examples=EXAMPLES, lot=LOT) for step in range(STEPS)]
    farthest = 0.0
    for example in range(EXAMPLES):
        turns = [step for step, lot in enumerate(lots) if example in lot]
        for signs in itertools.product((1.0, -1.0), repeat=len(turns)):
            farthest = max(farthest, float(np.linalg.norm(c[:, turns] @ np.array(signs))))
    return farthest


def the_event_covers_every_example(made, sampling=None):
    for seed in range(20):
        assert moved(made, sampling or made.sampling, seed) <= charged(made) * (1 + 1e-9)


@pytest.mark.parametrize("sampling", [sgd.Poisson(), sgd.Shuffled()])
def test_the_event_covers_what_was_drawn(sampling):
    the_event_covers_every_example(plan(sampling=sampling))


@pytest.mark.parametrize(
    ("sampling", "mutant"),
    [
        (sgd.Poisson(), sgd.Poisson()),  # lots of all examples, charged as cyclic ones
        (sgd.Poisson(), sgd.CyclicPoisson(2)),  # fewer groups than bands
        (sgd.Shuffled(), sgd.Shuffled()),  # a fresh order each epoch: its last lot may be the next one's first
    ],
)
def test_lots_in_which_turns_come_too_close_are_caught(sampling, mutant):
    with pytest.raises(AssertionError):
        the_event_covers_every_example(plan(sampling=sampling), mutant)


@pytest.mark.parametrize("sampling", [sgd.Poisson(), sgd.Shuffled()])
def test_a_band_that_is_too_wide_for_the_separation_is_refused(sampling):
    plan(sampling=sampling, correlated=sgd.Banded(EXAMPLES // LOT))
    with pytest.raises(InvalidArgument, match=r"^bands=5"):
        plan(sampling=sampling, correlated=sgd.Banded(EXAMPLES // LOT + 1))


def test_a_band_that_was_widened_unseen_is_caught():
    made = plan(sampling=sgd.Shuffled())
    object.__setattr__(made, "correlated", sgd.Banded(BANDS + 2).settled(STEPS))
    with pytest.raises(AssertionError):
        the_event_covers_every_example(made)


def test_columns_that_are_not_scaled_are_caught():
    made = plan(sampling=sgd.Shuffled())
    banded = sgd.Banded(BANDS).settled(STEPS)
    banded.__dict__["sensitivity"] = 1.0  # as if C had columns of norm 1 as it is
    object.__setattr__(made, "correlated", banded)
    with pytest.raises(AssertionError):
        the_event_covers_every_example(made)
