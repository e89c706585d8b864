"""Every aggregator: its event, its contract, and runs against worst-case neighbouring votes."""

import math

import numpy as np
import pytest

from terrine import accounting, events, pate
from terrine.audit.tester import lower_bound
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget
from terrine.rng import Seeded

TEACHERS = 40
DEAL = pate.split(400, TEACHERS, seed=0)
RULES = {
    "laplace": pate.LaplaceMax(2.0),
    "gaussian": pate.GaussianMax(3.0),
    "confident": pate.ConfidentGaussianMax(threshold=21, test_noise=2.0, noise=1.5),
    "interactive": pate.InteractiveGaussianMax(threshold=1, test_noise=2.0, noise=1.5),
    "stable": pate.StableMax(epsilon=0.8, delta=1e-2),
    "subsample": pate.SubsampleAggregate(epsilon=0.8, delta=1e-2),
    "sparse": pate.SparseVectorMax(epsilon=1.0, delta=1e-2, queries=3, unstable=1),
}


def votes_of(*rows):
    return pate.Votes(np.array(rows), DEAL.record())


def answered(rule, votes, rng):
    if isinstance(rule, pate.InteractiveGaussianMax):
        student = np.full(votes.counts.shape, 1 / votes.classes)
        return rule.answer(votes, student=student, rng=rng)
    return rule.answer(votes, rng=rng)


def test_every_exported_aggregator_is_under_these_tests():
    exported = {getattr(pate, name) for name in pate.__all__ if name.endswith(("Max", "Aggregate"))}
    assert exported == {type(rule) for rule in RULES.values()}


@pytest.mark.parametrize("name", RULES)
def test_answers_are_labels_with_a_priced_seeded_event(name):
    rule = RULES[name]
    found = answered(rule, votes_of([38, 1, 1], [1, 38, 1], [14, 13, 13]), Seeded(3))
    assert found.labels.shape == (3,)
    assert set(found.labels.tolist()) <= {-1, 0, 1, 2}
    assert isinstance(found.event, events.Reproducible)
    cost = accounting.epsilon(found.event, delta=0.05)
    assert 0 < cost < math.inf
    assert events.settled_neighbours(found.event) is events.Neighbours.REPLACE_ONE
    assert events.from_json(events.to_json(found.event)) == found.event


@pytest.mark.parametrize("name", RULES)
def test_more_queries_never_cost_less(name):
    rule = RULES[name]
    costs = [accounting.epsilon(rule.event(number), delta=0.06) for number in (1, 2, 3)]
    assert costs == sorted(costs)
    assert costs[0] > 0


PAIRS = [([21, 19, 0], [20, 20, 0]), ([20, 20, 0], [19, 21, 0]), ([22, 18, 0], [21, 18, 1]), ([24, 8, 8], [23, 9, 8])]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_no_pair_of_neighbouring_votes_refutes_the_claim(name, pair):
    """One query, up to 30,000 runs on each side; a false alarm has probability below 1e-6 for each test."""
    rule, rng = RULES[name], Seeded(11)
    delta = 0.0 if name == "laplace" else 1e-2
    claim = 2 / rule.noise if name == "laplace" else accounting.epsilon(rule.event(1), delta=delta * (1 + 1e-9))
    found = lower_bound(
        lambda row, count: _runs(rule, row, count, rng),
        *pair,
        trials=2_000 if name == "sparse" else 30_000,
        delta=delta,
    )
    assert not found.refutes(claim)


def test_the_tester_catches_laplace_noise_billed_as_gamma():
    """Lap(1/gamma) on counts is (2 gamma, 0)-DP; billed as gamma, it is refuted."""
    gamma = 1.0
    rule, rng = pate.LaplaceMax(1 / gamma), Seeded(5)
    found = lower_bound(lambda row, count: _runs(rule, row, count, rng), [21, 19, 0], [20, 20, 0], trials=30_000)
    assert found.refutes(0.4 * gamma)
    claims = [accounting.epsilon(rule.event(1), delta=1e-12), 2 * gamma]
    assert claims[0] == pytest.approx(claims[1], rel=1e-6)
    two = lambda row, count: _sums(row, count, gamma, rng)  # noqa: E731
    assert lower_bound(two, [21, 19, 0], [20, 20, 0], trials=200_000, confidence=0.999).refutes(gamma)


def test_the_tester_catches_a_threshold_without_noise():
    def plain(row, count):
        return [int(max(row) >= 21)] * count

    assert lower_bound(plain, [21, 19, 0], [20, 20, 0], trials=5000).refutes(5.0)


def _runs(rule, row, count, rng):
    """`count` independent single queries; rules with a memory are run one at a time."""
    if isinstance(rule, pate.SparseVectorMax):
        one = votes_of(row)
        return [int(rule.answer(one, rng=rng).labels[0]) for _ in range(count)]
    many = pate.Votes(np.tile(row, (count, 1)), DEAL.record())
    return answered(rule, many, rng).labels.tolist()


def _sums(row, count, gamma, rng):
    """The noisy counts of the first two classes, cut at where the likelihoods differ most."""
    generator = np.random.default_rng(rng.word() % 2**32)
    noisy = np.array(row[:2]) + generator.laplace(scale=1 / gamma, size=(count, 2))
    return (np.sign(noisy[:, 0] - 20.5) + 3 * np.sign(noisy[:, 1] - 19.5)).tolist()


def test_answers_have_the_odds_of_the_ideal_mechanism():
    """The plurality's share of 60,000 answers against the exact odds; four deviations, false alarm 1e-4 in all."""
    rng = Seeded(2)
    for rule, odds in (
        (pate.GaussianMax(3.0), 0.5 * math.erfc(-4 / (2 * 3.0))),
        (pate.LaplaceMax(2.0), 1 - (2 + 4 / 2) / (4 * math.exp(4 / 2))),
    ):
        labels = rule.answer(pate.Votes(np.tile([22, 18], (60_000, 1)), DEAL.record()), rng=rng).labels
        assert abs((labels == 0).mean() - odds) < 4 * math.sqrt(odds * (1 - odds) / 60_000)
        wrong = 0.5 * math.erfc(-4 / (2 * 4.0))
        assert abs((labels == 0).mean() - wrong) > 4 * math.sqrt(wrong / 60_000)


# ---- budgets, plans and accounts ----


class Book:
    def __init__(self, refuse=False):
        self.charges, self.refuse = [], refuse

    def charge(self, event, *, purpose, by, **more):
        if self.refuse:
            raise BudgetExceeded("nothing left")
        self.charges.append((event, purpose, by, more))


@pytest.mark.parametrize("name", ["laplace", "gaussian", "confident", "stable"])
def test_a_budget_stops_the_run_before_it_is_exceeded(name):
    rule, budget = RULES[name], Budget(3.0, 0.05)
    votes = pate.Votes(np.tile([30, 5, 5], (200, 1)), DEAL.record())
    found = rule.answer(votes, budget=budget, rng=Seeded(1))
    assert accounting.delta(found.event, epsilon=3.0) <= 0.05
    assert 0 < found.asked <= 200
    assert "budget allows" in found.stopped
    assert (found.labels[found.asked :] == pate.ABSTAINED).all()
    with pytest.raises(BudgetExceeded):
        rule.answer(votes, budget=Budget(0.001, 1e-9), rng=Seeded(1))


@pytest.mark.parametrize("name", RULES)
def test_an_account_is_charged_before_anything_is_drawn(name):
    class Counted:
        reproducible = True
        drawn = 0

        def words(self, count):
            Counted.drawn += count
            return Seeded(0).words(count)

        def word(self):
            Counted.drawn += 1
            return Seeded(0).word()

    rule, votes = RULES[name], votes_of([30, 5, 5])
    options = {"student": np.full((1, 3), 1 / 3)} if name == "interactive" else {}
    with pytest.raises(BudgetExceeded):
        rule.answer(votes, account=Book(refuse=True), rng=Counted(), **options)
    assert Counted.drawn == 0
    book = Book()
    found = rule.answer(votes, account=book, rng=Seeded(0), **options)
    assert [event for event, *_ in book.charges] == [found.event]


def test_a_plan_of_few_answers_costs_less_and_is_kept():
    rule = pate.ConfidentGaussianMax(threshold=20, test_noise=4.0, noise=3.0)
    votes = pate.Votes(np.tile([38, 1, 1], (50, 1)), DEAL.record())
    found = rule.answer(votes, most=7, rng=Seeded(0))
    assert len(found.answered) == 7
    assert found.asked < 50
    assert "7 planned answers" in found.stopped
    assert accounting.epsilon(found.event, delta=1e-5) < accounting.epsilon(rule.event(50), delta=1e-5)


def test_a_run_that_stops_does_not_tell_where_the_next_answer_would_have_been():
    """`asked` ends with the last answer: were it the next query that passes, its test would be told and not priced."""
    rule = pate.ConfidentGaussianMax(threshold=30, test_noise=0.01, noise=0.01)
    sure, split = [38, 1, 1], [14, 13, 13]
    ends = {rule.answer(votes_of(sure, split, *rest), most=1, rng=Seeded(0)).asked for rest in ([sure], [split])}
    assert ends == {1}


def test_every_rule_takes_most_and_only_one_takes_a_student():
    votes = pate.Votes(np.tile([38, 1, 1], (3, 1)), DEAL.record())
    for rule in RULES.values():
        given = {"student": np.full((3, 3), 1 / 3)}
        known = given if rule.wants_student else {}
        found = rule.answer(votes, most=2, rng=Seeded(0), **known)
        assert len(found.answered) <= 2
        assert found.asked <= (3 if rule.tests_first else 2)
        assert found.asked == 3 or found.stopped
        with pytest.raises(InvalidArgument, match="student"):
            rule.answer(votes, rng=Seeded(0), **({} if rule.wants_student else given))


def test_noise_may_differ_from_query_to_query():
    rule = pate.GaussianMax([1.0, 1.0, 50.0])
    same = events.Composed(
        [
            events.Repeated(pate.GaussianMax(1.0).event(1), times=2),
            events.Repeated(pate.GaussianMax(50.0).event(1), times=1),
        ]
    )
    assert accounting.epsilon(rule.event(3), delta=1e-5) == pytest.approx(accounting.epsilon(same, delta=1e-5))
    assert len(rule.answer(votes_of([30, 5, 5], [30, 5, 5], [30, 5, 5]), rng=Seeded(0)).labels) == 3
    with pytest.raises(InvalidArgument, match="3 entries for 4"):
        rule.event(4)


def test_gaussian_max_is_a_gaussian_of_sensitivity_root_two():
    assert pate.GaussianMax(40.0).event(100) == events.Repeated(
        events.Gaussian(noise=40 / math.sqrt(2), neighbours=events.Neighbours.REPLACE_ONE, unit=events.Unit.EXAMPLE),
        times=100,
    )


def test_the_interactive_student_keeps_its_own_confident_labels():
    rule = pate.InteractiveGaussianMax(threshold=20, test_noise=0.5, noise=0.5, confidence=0.8)
    votes = votes_of([38, 1, 1], [1, 38, 1], [1, 1, 38])
    student = np.array([[0.95, 0.03, 0.02], [0.95, 0.03, 0.02], [0.4, 0.3, 0.3]])
    found = rule.answer(votes, student=student, rng=Seeded(0))
    assert found.labels.tolist() == [0, 1, 2]
    calm = rule.answer(votes_of([16, 12, 12]), student=np.array([[0.4, 0.3, 0.3]]), rng=Seeded(0))
    assert calm.labels.tolist() == [-1]


def test_teachers_that_share_data_are_refused():
    shared = pate.Subsampled(rate=0.5, teachers=TEACHERS).draw(30, rng=Seeded(0)).record()
    votes = pate.Votes(np.array([[30, 10]]), shared)
    for name, rule in RULES.items():
        if name not in ("subsample", "interactive"):
            with pytest.raises(InvalidArgument, match="not disjoint"):
                rule.answer(votes, rng=Seeded(0))
    assert RULES["subsample"].answer(votes, rng=Seeded(0)).labels.shape == (1,)


# ---- stability ----


def test_the_distance_is_how_many_votes_the_plurality_survives():
    from terrine.pate.stability import distances

    for first in range(21):
        row = np.array([first, 20 - first])
        survives = 0
        while _keeps(row, survives + 1):
            survives += 1
        claimed = int(distances(row[None])[0])
        assert claimed <= survives
        assert claimed >= survives - 1


def _keeps(row, people):
    moved = [row + np.array([-step, step]) for step in range(-people, people + 1)]
    reachable = [one for one in moved if one.min() >= 0]
    return all(one.argmax() == row.argmax() for one in reachable) and len(reachable) < 42 and people <= 20


def test_sparse_vector_uses_less_noise_than_published_and_keeps_its_promise():
    rule = pate.SparseVectorMax(epsilon=1.0, delta=1e-5, queries=1000, unstable=20)
    scale, threshold = rule.published
    assert scale == pytest.approx(math.sqrt(32 * 20 * math.log(2e5)) / 1.0)
    assert rule.scale < scale
    assert rule.threshold < threshold
    inner = events.Repeated(events.PureDP(epsilon=2 / rule.scale), times=20)
    assert accounting.delta(inner, epsilon=1.0) <= 0.5e-5


def test_sparse_vector_stops_at_the_last_unstable_query():
    rule = pate.SparseVectorMax(epsilon=4.0, delta=1e-2, queries=60, unstable=3)
    votes = pate.Votes(np.array([[4000, 0]] * 20 + [[2000, 2000]] * 40), pate.split(4000, 4000, seed=0).record())
    found = rule.answer(votes, rng=Seeded(0))
    assert found.labels[:20].tolist() == [0] * 20
    assert found.asked == 23
    assert "3 queries were unstable" in found.stopped
