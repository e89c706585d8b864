"""Attack: have a plan on rows called a guarantee for people, by a label alone."""

import numpy as np
import pytest

from terrine import events, mechanisms, pate, sgd
from terrine.errors import InvalidArgument, TerrineError
from terrine.events import Unit, to_json


@pytest.mark.parametrize("unit", [Unit.PERSON, Unit.CLIENT, "person", "banana", 3])
def test_a_plan_on_rows_protects_one_row_whatever_it_is_called(unit):
    with pytest.raises(InvalidArgument, match="one example"):
        sgd.Plan(examples=100, lot=10, steps=5, clip=1.0, noise=1.0, delta=1e-5, unit=unit)


def test_what_a_plan_protects_may_be_said():
    plan = sgd.Plan(examples=100, lot=10, steps=5, clip=1.0, noise=1.0, delta=1e-5, unit=Unit.EXAMPLE)
    assert plan.unit is events.settled_unit(plan.event) is Unit.EXAMPLE


def test_a_deal_of_examples_is_no_deal_of_people():
    with pytest.raises(TypeError):
        pate.Partition(np.array([0, 1, 0, 1]), 2, unit=Unit.PERSON)
    with pytest.raises(InvalidArgument, match="person 7 is with several teachers"):
        pate.Partition(np.array([0, 1, 0, 1]), 2, people=np.array([7, 7, 8, 9]))
    with pytest.raises(InvalidArgument, match="for each of 4"):
        pate.Partition(np.array([0, 1, 0, 1]), 2, people=np.array([7, 7]))
    assert pate.Partition(np.array([0, 1, 0, 1]), 2, people=np.array([7, 9, 7, 8])).unit is Unit.PERSON
    assert pate.Partition(np.array([0, 1, 0, 1]), 2).unit is Unit.EXAMPLE


def test_a_deal_of_people_stays_one_on_disk(tmp_path):
    deal = pate.split(6, 2, seed=1, groups=["ann", "bob", "ann", "eve", "bob", "ann"])
    deal.save(tmp_path / "deal.json")
    assert pate.Partition.load(tmp_path / "deal.json").unit is Unit.PERSON
    assert "ann" not in (tmp_path / "deal.json").read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda unit: events.Gaussian(noise=1.0, unit=unit),
        lambda unit: events.PureDP(epsilon=1.0, unit=unit),
        lambda unit: events.NonPrivate(unit=unit),
        lambda unit: events.ApproximateDP(epsilon=1.0, delta=1e-6, unit=unit),
        lambda unit: events.DiscreteLaplace(noise=1.0, unit=unit),
        lambda unit: mechanisms.Counts(epsilon=1.0, unit=unit).event,
    ],
)
def test_a_unit_that_is_none_is_refused_by_every_event(make):
    for wrong in ("banana", "person", 3):
        with pytest.raises(TerrineError, match="unit"):
            make(wrong)
    assert to_json(make(Unit.PERSON))


def test_neighbours_that_are_none_are_refused_too():
    with pytest.raises(TerrineError, match="neighbours"):
        events.Gaussian(noise=1.0, neighbours="replace-one")
