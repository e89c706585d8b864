"""Deals are disjoint, even and repeatable; votes carry their deal and refuse what is not a vote."""

import numpy as np
import pytest

from terrine import pate
from terrine.errors import InvalidArgument
from terrine.events import Unit
from terrine.pate.partitions import Partition
from terrine.rng import Seeded


def test_a_deal_is_even_disjoint_and_repeatable():
    deal = pate.split(103, 10, seed=4)
    parts = deal.parts
    assert sorted(np.concatenate(parts).tolist()) == list(range(103))
    assert {len(part) for part in parts} == {10, 11}
    assert deal.digest == pate.split(103, 10, seed=4).digest != pate.split(103, 10, seed=5).digest


def test_a_person_has_one_teacher():
    people = np.random.default_rng(0).integers(0, 40, size=500)
    deal = pate.split(500, 8, seed=1, groups=people)
    assert deal.unit is Unit.PERSON
    for person in range(40):
        assert len(set(deal.assignment[people == person])) <= 1


def test_renaming_one_person_moves_nobody_else():
    people = np.repeat(np.arange(30), 3)
    other = people.copy()
    other[other == 7] = 1000
    same = pate.split(90, 5, seed=2, groups=people).assignment == pate.split(90, 5, seed=2, groups=other).assignment
    assert same.all()


def test_a_deal_survives_the_disk_and_a_changed_one_does_not(tmp_path):
    deal = pate.split(20, 4, seed=0)
    deal.save(tmp_path / "p.json")
    assert Partition.load(tmp_path / "p.json").digest == deal.digest
    text = (tmp_path / "p.json").read_text().replace('"teachers": 4', '"teachers": 5')
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InvalidArgument):
        Partition.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: pate.split(3, 4, seed=0), "at most one for each of the 3 examples"),
        (lambda: pate.split(9, 4, seed=0, groups=[1, 1, 1, 2, 2, 2, 3, 3, 3]), "3 people"),
        (lambda: pate.split(9, 4, seed=0, groups=[1]), "1 entries for 9"),
        (lambda: Partition.of_parts([[0, 1], [1, 2]]), "example 1 is with teachers 0 and 1"),
        (lambda: Partition.of_parts([[0, 0], [1]]), "disjoint"),
        (lambda: Partition.of_parts([[0], [2]]), "example 1 is with no teacher"),
        (lambda: Partition(np.array([0, 2]), 3), r"teachers \[1\] have no examples"),
    ],
)
def test_deals_that_do_not_protect_are_refused(make, why):
    with pytest.raises(InvalidArgument, match=why):
        make()


def test_subsampled_teachers_fail_when_somebody_is_in_too_many_parts():
    deal = pate.Subsampled(rate=0.2, teachers=200)
    found = deal.draw(50, rng=Seeded(1))
    assert found.taken.sum(axis=0).max() <= deal.most_parts == 80
    assert 0.15 < found.taken.mean() < 0.25
    with pytest.raises(InvalidArgument, match="M_samp fails"):
        pate.Subsampled(rate=0.05, teachers=12).draw(400, rng=Seeded(1))


def test_votes_are_counted_and_their_counts_stay_out_of_sight(tmp_path):
    deal = pate.split(6, 3, seed=0)
    votes = pate.count([[0, 1], [0, 2], [2, 2]], classes=3, deal=deal)
    assert votes.counts.tolist() == [[2, 0, 1], [0, 1, 2]]
    assert repr(votes) == "Votes(2 queries, 3 classes, 3 teachers)"
    votes.save(tmp_path / "v.npz")
    assert (tmp_path / "v.npz").stat().st_mode & 0o077 == 0
    assert pate.Votes.load(tmp_path / "v.npz").counts.tolist() == votes.counts.tolist()


@pytest.mark.parametrize(
    ("predictions", "classes", "why"),
    [
        ([[0.0], [np.nan], [1.0]], 2, "teacher 1 predicts nan for query 0"),
        ([[0], [1]], 2, "each of 3 teachers"),
        ([[0], [1], [5]], 2, r"class 5: want 0 \.\. 1"),
        ([[0.5], [1.0], [1.0]], 2, "not whole"),
        ([[0], [0], [0]], 1, "at least 2 classes"),
    ],
)
def test_predictions_that_are_no_votes_are_refused(predictions, classes, why):
    with pytest.raises(InvalidArgument, match=why):
        pate.count(predictions, classes=classes, deal=pate.split(6, 3, seed=0))


def test_votes_must_sum_to_the_teachers():
    with pytest.raises(InvalidArgument, match="query 1 sum to 2: want 3"):
        pate.Votes(np.array([[2, 1], [1, 1]]), pate.split(6, 3, seed=0).record())
