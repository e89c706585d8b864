"""Hypothesis strategies over the whole grammar of events: nested, extreme, repeated, under every neighbour relation."""

from __future__ import annotations

from hypothesis import strategies as st

from terrine.events import (
    ApproximateDP,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NegativeBinomialCount,
    Neighbours,
    OneOf,
    PoissonCount,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RandomStopping,
    Repeated,
    Reproducible,
    Selection,
    ShuffledEpoch,
    Skellam,
    SummedDiscreteGaussian,
)


def powers_of_ten(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10.0**power)


noises = powers_of_ten(-1, 2) | powers_of_ten(-3, 6)
epsilons = powers_of_ten(-3, 1) | powers_of_ten(-12, 3)
rates = powers_of_ten(-3, 0) | powers_of_ten(-9, 0) | st.just(1.0)
times = st.integers(1, 20) | powers_of_ten(0, 4).map(int) | powers_of_ten(0, 18).map(int)
deltas = powers_of_ten(-10, -3) | powers_of_ten(-300, -0.302) | st.sampled_from([0.5, 1e-300])
counts = st.builds(NegativeBinomialCount, shape=st.floats(-0.9, 5.0), gamma=powers_of_ten(-4, -0.01)) | st.builds(
    PoissonCount, mean=powers_of_ten(0, 3)
)

leaves = st.one_of(
    st.builds(Gaussian, noise=noises),
    st.builds(Gaussian, noise=noises),
    st.builds(Laplace, noise=noises),
    st.builds(DiscreteLaplace, noise=noises, sensitivity=st.integers(1, 1000)),
    st.builds(DiscreteGaussian, noise=noises, sensitivity=st.integers(1, 50), scalar=st.booleans()),
    st.builds(Skellam, noise=noises, sensitivity=powers_of_ten(0, 4)),
    st.builds(SummedDiscreteGaussian, noise=noises, sensitivity=powers_of_ten(0, 4), shares=st.integers(1, 200)),
    st.builds(RandomizedResponse, epsilon=epsilons),
    st.builds(PureDP, epsilon=epsilons),
    st.builds(Selection, epsilon=epsilons, monotone=st.booleans()),
    st.builds(ApproximateDP, epsilon=epsilons, delta=st.just(0.0) | powers_of_ten(-15, -4)),
)


@st.composite
def _fixed_size(draw, inner):
    population = draw(st.integers(1, 10**6))
    return FixedSizeSampled(draw(inner), size=draw(st.integers(1, population)), population=population)


def events_under(relation: Neighbours | None, depth: int) -> st.SearchStrategy:
    """Events that fit under `relation`; None is for those that say nothing of it."""
    if depth == 0:
        return leaves
    inner = events_under(relation, depth - 1)
    made = [
        leaves,
        st.builds(Repeated, inner, times=times),
        st.builds(Repeated, inner, times=times),
        st.builds(Composed, st.lists(inner, min_size=0, max_size=3)),
        st.builds(OneOf, st.lists(leaves, min_size=1, max_size=2)) | inner.map(lambda part: OneOf([part, part])),
        st.builds(Reproducible, inner),
        st.builds(RandomStopping, inner, count=counts),
    ]
    if relation is Neighbours.ADD_REMOVE:
        made += 3 * [st.builds(PoissonSampled, inner, rate=rates)]
    if relation is Neighbours.REPLACE_ONE:
        alone = events_under(None, depth - 1)
        made.append(st.builds(PoissonSampled, alone, rate=rates, neighbours=st.just(Neighbours.REPLACE_ONE)))
        made += 2 * [_fixed_size(inner), st.builds(ShuffledEpoch, inner, steps=st.integers(1, 1000))]
    return st.one_of(made)


events = st.one_of(events_under(Neighbours.ADD_REMOVE, 3), events_under(Neighbours.REPLACE_ONE, 3))
