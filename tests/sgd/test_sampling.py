"""One suite over every sampler: what it draws is what its event says, and what its plan bills."""

import inspect
import math

import numpy as np
import pytest

from terrine import accounting, sgd
from terrine.common.keys import Key
from terrine.events import Gaussian, Neighbours, settled_neighbours
from terrine.sgd import sampling as sampling_module

KINDS = {
    kind
    for _, kind in inspect.getmembers(sampling_module, inspect.isclass)
    if kind.__module__ == sampling_module.__name__ and kind is not sampling_module.Sampling
}
SAMPLERS = [sgd.FixedSize(), sgd.Poisson(), sgd.Shuffled(), sgd.Shuffled(Neighbours.ZERO_OUT)]
APART = [sgd.CyclicPoisson(2), sgd.FixedOrder(), sgd.FixedOrder(Neighbours.ZERO_OUT)]
KEY = Key.seeded(11)


def stages(noise=1.0, steps=10):
    return [(Gaussian(noise=noise), noise, steps)]


def test_no_sampler_is_forgotten():
    assert {type(one) for one in (*SAMPLERS, *APART)} == KINDS


@pytest.mark.parametrize("sampler", [*SAMPLERS, *APART], ids=repr)
class TestEverySampler:
    def test_draws_distinct_examples_of_the_data(self, sampler):
        for step in range(30):
            drawn = sampler.draw(KEY, step, examples=57, lot=10)
            assert drawn.dtype == np.int64
            assert len(set(drawn.tolist())) == len(drawn)
            assert all(0 <= index < 57 for index in drawn)

    def test_draws_the_same_lot_again_for_the_same_step_only(self, sampler):
        first = [sampler.draw(KEY, step, examples=500, lot=50).tolist() for step in range(12)]
        assert first == [sampler.draw(KEY, step, examples=500, lot=50).tolist() for step in range(12)]
        assert len({tuple(lot) for lot in first}) == (10 if isinstance(sampler, sgd.FixedOrder) else 12)

    def test_every_example_is_as_likely_as_the_rate_says(self, sampler):
        counts = np.zeros(40)
        for step in range(4000):
            counts[sampler.draw(KEY, step, examples=40, lot=10)] += 1
        assert np.all(np.abs(counts - 1000) < 5.5 * math.sqrt(4000 * 0.25 * 0.75))  # false alarm below 1e-5

    def test_takes_whole_data_sets_and_single_examples(self, sampler):
        sampler = sgd.CyclicPoisson(1) if sampler == sgd.CyclicPoisson(2) else sampler
        assert len(sampler.draw(KEY, 0, examples=7, lot=7)) == 7
        assert len(sampler.draw(KEY, 0, examples=1, lot=1)) == 1

    def test_reaches_twice_as_far_only_where_an_example_is_replaced(self, sampler):
        relation = settled_neighbours(sampler.event(stages(), examples=100, lot=10))
        assert sampler.reach == (2.0 if relation is Neighbours.REPLACE_ONE else 1.0)

    def test_costs_more_with_less_noise_and_with_more_steps(self, sampler):
        def epsilon(**given):
            return accounting.epsilon(sampler.event(stages(**given), examples=100, lot=10), delta=1e-5)

        assert 0 < epsilon(noise=2.0) < epsilon(noise=1.0) < epsilon(noise=1.0, steps=40)


def test_a_shuffled_epoch_holds_every_example_once():
    lots = [sgd.Shuffled().draw(KEY, step, examples=25, lot=10) for step in range(6)]
    assert [len(lot) for lot in lots] == [10, 10, 5, 10, 10, 5]
    assert sorted(np.concatenate(lots[:3])) == sorted(np.concatenate(lots[3:])) == list(range(25))


def test_a_poisson_lot_is_random_in_size_and_a_fixed_one_is_not():
    sizes = {type(one): {len(one.draw(KEY, step, examples=50, lot=10)) for step in range(50)} for one in SAMPLERS[:2]}
    assert sizes[sgd.FixedSize] == {10}
    assert len(sizes[sgd.Poisson]) > 3
