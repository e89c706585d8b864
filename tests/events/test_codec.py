"""Events survive a trip through JSON, and nothing else gets in."""

import pytest

from terrine import events as e
from terrine.errors import InvalidArgument, MalformedEvents

EXAMPLES = [
    e.Laplace(noise=0.1),
    e.Gaussian(noise=4.0, neighbours=e.Neighbours.REPLACE_ONE, unit=e.Unit.PERSON),
    e.DiscreteLaplace(noise=1 / 3, sensitivity=2),
    e.DiscreteGaussian(noise=2.5, scalar=False),
    e.Skellam(noise=1.5, sensitivity=512.25, unit=e.Unit.CLIENT),
    e.SummedDiscreteGaussian(noise=1.5, sensitivity=512.25, shares=40),
    e.RandomizedResponse(epsilon=1.0986122886681098),
    e.PureDP(epsilon=0.0),
    e.ApproximateDP(epsilon=1.0, delta=1e-9),
    e.Selection(epsilon=0.5, monotone=True),
    e.PoissonSampled(e.Gaussian(noise=1.1), rate=256 / 60000),
    e.FixedSizeSampled(e.Gaussian(noise=1.1), size=256, population=60000),
    e.ShuffledEpoch(e.Gaussian(noise=1.1), steps=234, neighbours=e.Neighbours.ZERO_OUT),
    e.Repeated(e.Laplace(noise=3.0), times=10**8),
    e.Composed([e.Laplace(noise=1.0), e.Repeated(e.Gaussian(noise=2.0), times=3)]),
    e.Composed([]),
    e.NonPrivate(),
    e.Reproducible(e.Gaussian(noise=1.0)),
    e.RandomStopping(e.Gaussian(noise=1.0), e.PoissonCount(mean=4.0)),
    e.OneOf([e.Gaussian(noise=1.0), e.PoissonSampled(e.Gaussian(noise=2.0), rate=0.5)]),
    e.RandomStopping(e.PureDP(epsilon=1.0), e.NegativeBinomialCount(shape=0.0, gamma=0.1)),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_equal(event):
    assert e.from_json(e.to_json(event)) == event


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ('{"kind": "os.system"}', "want one of"),
        ('{"kind": "Gaussian"}', "noise"),
        ('{"kind": "Gaussian", "noise": -1}', "want > 0"),
        ('{"kind": "Gaussian", "noise": NaN}', "NaN"),
        ('{"kind": "Gaussian", "noise": "4"}', "noise"),
        ('{"kind": "Gaussian", "noise": 4, "colour": 1}', "colour"),
        ('{"kind": "Repeated", "times": 2.5, "event": {"kind": "NonPrivate"}}', "whole"),
        ('{"terrine-events": 99, "event": {}}', "version 99"),
        ("3", "want an object"),
        ('{"kind": "RandomStopping", "event": {"kind": "NonPrivate"}, "count": {"kind": "Gaussian"}}', "PoissonCount"),
        ('{"kind": "PoissonCount", "mean": 3}', "want one of"),
    ],
)
def test_a_malformed_text_is_refused_in_one_line(text, why):
    with pytest.raises(MalformedEvents, match=why) as refusal:
        e.from_json(text)
    assert "\n" not in str(refusal.value)


def test_a_list_is_a_composition():
    text = '[{"kind": "Laplace", "noise": 1}, {"kind": "PureDP", "epsilon": 2}]'
    assert e.from_json(text) == e.Composed([e.Laplace(noise=1.0), e.PureDP(epsilon=2.0)])


def test_parts_under_different_relations_are_refused():
    lot = e.PoissonSampled(e.Gaussian(noise=1.0), rate=0.1)
    draw = e.FixedSizeSampled(e.Gaussian(noise=1.0), size=1, population=10)
    with pytest.raises(InvalidArgument, match="add-remove and replace-one"):
        e.Composed([lot, draw])


def test_a_sampler_refuses_noise_stated_under_another_relation():
    stated = e.Gaussian(noise=1.0, neighbours=e.Neighbours.ADD_REMOVE)
    with pytest.raises(InvalidArgument, match="replace-one"):
        e.FixedSizeSampled(stated, size=1, population=10)
