"""The number of runs has the law that was priced. False alarm: once in 10^4 runs of a case; seeds are fixed."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare, geom, logser, poisson

from terrine.errors import InvalidArgument
from terrine.events import NegativeBinomialCount, PoissonCount
from terrine.mechanisms.stopping import draw_count
from terrine.rng import SYSTEM, Seeded


def heavy(k):
    """Shape -1/2, gamma 0.2, by its definition."""
    weight = [0.8**n * math.prod((step - 0.5) / (step + 1) for step in range(n)) for n in range(1, 400)]
    return weight[int(k) - 1] / sum(weight)


LAWS = {
    "poisson 3.7": (PoissonCount(mean=3.7), lambda k: poisson.pmf(k, 3.7)),
    "poisson 1": (PoissonCount(mean=1.0), lambda k: poisson.pmf(k, 1.0)),
    "geometric": (NegativeBinomialCount(shape=1.0, gamma=0.3), lambda k: geom.pmf(k, 0.3)),
    "logarithmic": (NegativeBinomialCount(shape=0.0, gamma=0.1), lambda k: logser.pmf(k, 0.9)),
    "heavy": (NegativeBinomialCount(shape=-0.5, gamma=0.2), np.vectorize(heavy)),
}


def likelihood(count, law, draws=4000):
    rng = Seeded(7)
    drawn = np.minimum([draw_count(count, rng) for _ in range(draws)], 12)
    places = np.arange(12)
    chances = np.where(places >= (0 if isinstance(count, PoissonCount) else 1), law(np.maximum(places, 1)), 0.0)
    if isinstance(count, PoissonCount):
        chances[0] = law(0)
    chances = np.append(chances, 1 - chances.sum())
    kept = chances > 1e-3
    seen = np.bincount(drawn, minlength=13)[kept]
    expected = chances[kept] * seen.sum() / chances[kept].sum()
    return chisquare(seen, expected).pvalue


@pytest.mark.parametrize(("count", "law"), LAWS.values(), ids=LAWS)
def test_the_draw_has_its_law(count, law):
    assert likelihood(count, law) > 1e-4


def test_another_law_is_found_out():
    assert likelihood(PoissonCount(mean=3.7), lambda k: poisson.pmf(k, 4.0)) < 1e-4
    assert likelihood(NegativeBinomialCount(shape=0.0, gamma=0.1), lambda k: geom.pmf(k, 0.3)) < 1e-4


def test_it_draws_from_the_system_and_refuses_what_it_cannot_draw():
    assert draw_count(PoissonCount(mean=50.0), SYSTEM) > 5
    with pytest.raises(InvalidArgument, match="shape"):
        draw_count(NegativeBinomialCount(shape=2.0, gamma=0.5), SYSTEM)
