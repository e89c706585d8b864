"""Person-level DP-SGD: people are drawn, and the mean of a person's rows is clipped as one."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from terrine import sgd
from terrine.audit import lower_bound
from terrine.common.keys import Key
from terrine.common.people import People
from terrine.errors import InvalidArgument
from terrine.events import Budget, Gaussian, PoissonSampled, Repeated, Unit, settled_unit
from terrine.ledger import Ledger
from terrine.sgd.clipping import clipped_sum
from terrine.sgd.metrics import Budgeted
from terrine.sgd.release import StepRelease

from .helpers import distance, flatten, make_optimizer, run_loop

ROWS = [2, 1, 3, 1, 4, 2, 3]
MEAN = nn.CrossEntropyLoss()


class Tied(nn.Module):
    """A table that is read, and multiplied with."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, x):
        return functional.linear(self.table(x).tanh(), self.table.weight).mean(1)


class Scaled(nn.Module):
    """A weight that is computed from parameters, and one that no rule knows."""

    def __init__(self):
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(3, 1))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return functional.linear(x * self.shift.exp(), self.length * self.direction / self.direction.norm())


class Asks(nn.Module):
    """Rows of one person may answer differently."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return torch.cat([self.one(row) if row.sum() > 0 else self.two(row) for row in x.split(1)])


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class OneByOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return Own.apply(x, self.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.net(x)[0][:, -1])


def convolutional(groups):
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=groups), nn.Tanh(), nn.Flatten(), nn.Linear(100, 3)
    )


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))


MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(30, 3)), (6, 4)),
    "convolution": (convolutional(1), (2, 5, 5)),
    "depthwise": (convolutional(2), (2, 5, 5)),
    "normalised": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (4,)),
    "table": (lambda: nn.Sequential(nn.Embedding(11, 5), nn.Flatten(), nn.Linear(20, 3)), None),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 5), nn.Linear(5, 3)), None),
    "tied": (Tied, None),
    "scaled": (Scaled, (4,)),
    "recurrent": (Recurrent, (6, 5)),
    "attention": (encoder, (3, 8)),
    "asks": (Asks, (4,)),
    "one by one": (OneByOne, (4,)),
}  # fmt: skip


def case(name, rows):
    torch.manual_seed(3)
    make, shape = MODELS[name]
    size = sum(rows)
    x = torch.randint(0, 11, (size, 4)) if shape is None else torch.randn(size, *shape).double()
    return make().double(), x, torch.randint(0, 3, (size,))


def by_loop(model, x, y, rows, clip):
    """The slow, obvious sum: person by person, row by row."""
    totals, norms, start = [torch.zeros_like(p) for p in model.parameters()], [], 0
    for count in rows:
        mine = [torch.zeros_like(p) for p in model.parameters()]
        for at in range(start, start + count):
            loss = MEAN(model(x[at : at + 1]), y[at : at + 1])
            for total, gradient in zip(
                mine, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True
            ):
                total += 0 if gradient is None else gradient / count
        norms.append(torch.sqrt(sum(one.square().sum() for one in mine)))
        for total, one in zip(totals, mine, strict=True):
            total += one * min(1.0, clip / norms[-1])
        start += count
    return totals, torch.stack(norms)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_the_sum_is_that_of_a_loop_over_people(name, microbatch):
    model, x, y = case(name, ROWS)
    wanted, norms = by_loop(model, x, y, ROWS, 0.3)
    found = clipped_sum(model, MEAN, (x, y), clip=0.3, rows=ROWS, microbatch=microbatch)
    assert torch.allclose(found.norms, norms, rtol=1e-9, atol=1e-12)
    for one, other in zip(found.sums.values(), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "tied", "asks"])
def test_a_loop_releases_the_same_sum(name):
    model, x, y = case(name, ROWS)
    ids = np.repeat(np.arange(len(ROWS)), ROWS)
    plan = sgd.Plan(people=len(ROWS), lot=len(ROWS), rows_per_person=4, steps=2, clip=0.3, noise=0.0, delta=1e-5)
    wanted, _ = by_loop(model, x, y, ROWS, 0.3)
    for turn in run_loop(model, (x, y), plan, person=ids, optimizer=make_optimizer(model, 0.0)):
        assert torch.allclose(turn.gradient * len(ROWS), flatten(wanted), rtol=1e-9, atol=1e-12)


def test_a_person_with_a_thousand_rows_moves_the_sum_by_at_most_the_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = 50.0 * torch.randn(1005, 4).double(), torch.randint(0, 3, (1005,))
    few = clipped_sum(model, MEAN, (x[:5], y[:5]), clip=0.25, rows=[2, 3])
    many = clipped_sum(model, MEAN, (x, y), clip=0.25, rows=[2, 3, 1000])
    assert 0.2 < distance(few, many) <= 0.25 + 1e-12


def test_no_gradient_of_single_rows_is_made_for_a_large_weight():
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            seen.update(
                tuple(one.shape)
                for one in (made if isinstance(made, tuple) else (made,))
                if isinstance(one, torch.Tensor)
            )
            return made

    model = nn.Linear(300, 200)
    x, y = torch.randn(24, 300), torch.randint(0, 200, (24,))
    with Watch():
        clipped_sum(model, MEAN, (x, y), clip=1.0, rows=[4] * 6)
    assert (24, 200, 300) not in seen
    assert (6, 200, 300) not in seen
    assert (6, 4, 300) in seen


def test_a_row_that_is_not_finite_silences_its_person_alone():
    model, x, y = case("linear", [2, 3])
    broken = x.clone()
    broken[1] = float("nan")
    found = clipped_sum(model, MEAN, (broken, y), clip=0.3, rows=[2, 3])
    rest = clipped_sum(model, MEAN, (x[2:], y[2:]), clip=0.3, rows=[3])
    assert all(torch.equal(found.sums[name], rest.sums[name]) for name in rest.sums)


@pytest.mark.parametrize("way", ["trainer", "loop"])
def test_one_row_each_is_example_level_bit_for_bit(way):
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3
    common = {"lot": 20, "steps": 6, "clip": 0.5, "noise": 1.1, "delta": 1e-5, "seed": 4}

    def trained(plan, person):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        if way == "trainer":
            sgd.Trainer(model, optimizer, MEAN, plan, progress=False).fit((x, y), person=person)
            return [p.detach() for p in model.parameters()]
        run_loop(model, (x, y), plan, optimizer=optimizer, person=person)
        return [p.detach() for p in model.parameters()]

    rows = trained(sgd.Plan(examples=60, **common), None)
    people = trained(sgd.Plan(people=60, rows_per_person=1, **common), np.arange(60))
    assert all(map(torch.equal, rows, people))


def test_the_event_is_that_of_examples_with_a_person_as_its_unit():
    plan = sgd.Plan(people=100, lot=10, rows_per_person=3, steps=7, clip=1.0, noise=2.0, delta=1e-5)
    assert plan.event == Repeated(PoissonSampled(Gaussian(noise=2.0, unit=Unit.PERSON), rate=0.1), 7)
    assert plan.unit is settled_unit(plan.event) is Unit.PERSON
    rows = sgd.Plan(examples=100, lot=10, steps=7, clip=1.0, noise=2.0, delta=1e-5)
    assert plan.epsilon == rows.epsilon
    assert rows.unit is Unit.EXAMPLE


def test_rows_beyond_the_most_are_drawn_anew_from_the_persons_own():
    ids = np.array([7] * 50 + [3] * 2 + [9] * 4)
    people, key = People(ids, 56), Key.seeded(1)
    assert len(people) == 3
    found = set()
    for step in range(200):
        rows, counts = people.rows(np.array([0, 1, 2]), 3, key, step)
        assert counts == (2, 3, 3)
        assert sorted(set(ids[rows].tolist())) == [3, 7, 9]
        assert len(set(rows.tolist())) == 8
        mine = rows[ids[rows] == 7]
        found.update(mine.tolist())
        alone, _ = people.rows(np.array([0]), 3, key, step)  # person 7, whoever else is drawn
        assert np.array_equal(np.sort(alone), np.sort(mine))
    assert found == set(range(50))


def test_every_choice_of_rows_is_equally_likely():
    """Chi-squared on 1,500 draws of 2 of 4 rows: 6 sets, false alarm 1e-6 over the seed, which is fixed."""
    people, key = People(np.zeros(4, dtype=int), 4), Key.seeded(2)
    drawn = [tuple(people.rows(np.array([0]), 2, key, step)[0].tolist()) for step in range(1500)]
    counts = [drawn.count(pair) for pair in itertools.combinations(range(4), 2)]
    assert sum(counts) == 1500
    assert sum((count - 250) ** 2 / 250 for count in counts) < 35.9


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2, None, 4], "NoneType, int"),
        ([1, "1", 2, 3], "int, str"),
        ([1.0, float("nan"), 2.0, 3.0], "ids of float"),
        (np.array([1.0, np.nan, 2.0, 3.0]), "missing"),
        (np.array([0.5, 1.0, 2.0, 3.0]), "no whole number"),
        (np.array([1e17, 2.0, 3.0, 4.0]), "too large to be exact"),
        (np.array([16777216.0, 16777217.0, 3.0, 4.0], dtype=np.float32), "float32"),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16(), "bfloat16"),
        (np.ma.array([1, 2, 3, 4], mask=[0, 0, 1, 1]), "masked"),
        ([1, 2, 3], "3 ids; want one for each of the 4 rows"),
        (np.array([[1], [2], [3], [4]]), "one id for each row"),
        (np.array(["2020-01-01"] * 4, dtype="datetime64[D]"), "want whole numbers or texts"),
        ([True, False, True, True], "bool"),
        ({1, 2, 3, 4}, "a set"),
        ({1: 1, 2: 2, 3: 3, 4: 4}, "a dict"),
        ("abcd", "a str"),
    ],
)
def test_ids_that_could_join_or_lose_people_are_refused(ids, said):
    with pytest.raises(InvalidArgument, match=said):
        People(ids, 4)


@pytest.mark.parametrize(
    "ids",
    [
        [4, 4, 9, 1],
        ["ann", "bob", "ann", "eve"],
        torch.tensor([3, 3, 1, 0]),
        np.array([1.0, 1, 2, 3]),
        [2**63, 2**63, -1, 1],
        [np.int64(1), np.int64(1), 2, 3],
        ["a", "a", "a\0", "b"],
        ["7", "07", "7", "7.0"],
    ],
)
def test_ids_of_many_kinds(ids):
    assert len(People(ids, 4)) == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"examples": 10, "people": 10, "rows_per_person": 2}, "want examples=, or people="),
        ({}, "want examples=, or people="),
        ({"people": 10}, "rows_per_person= together"),
        ({"examples": 10, "rows_per_person": 2}, "rows_per_person= together"),
        ({"people": 10, "rows_per_person": 0}, "rows_per_person"),
        ({"people": 10, "rows_per_person": 2.5}, "rows_per_person"),
        ({"people": 4, "rows_per_person": 2}, "at most people=4"),
        ({"people": 10, "rows_per_person": 2, "unit": Unit.EXAMPLE}, "one person"),
        ({"people": 10, "rows_per_person": 2, "preparation": (Gaussian(noise=3.0),)}, "protects one example"),
    ],
)
def test_plans_that_mix_rows_and_people_are_refused(fields, said):
    with pytest.raises(InvalidArgument, match=said):
        sgd.Plan(lot=5, steps=3, clip=1.0, noise=1.0, delta=1e-5, **fields)


def begin(plan, person, rows=12, account=None, **options):
    model = nn.Linear(4, 3)
    data = (torch.zeros(rows, 4), torch.zeros(rows, dtype=torch.long))
    return sgd.private_steps(
        model, make_optimizer(model), data, plan, loss=MEAN, account=account, person=person, **options
    )


def people_plan(**fields):
    usual = {"people": 4, "lot": 2, "rows_per_person": 2, "steps": 3, "clip": 1.0, "noise": 1.0, "delta": 1e-5}
    return sgd.Plan(**usual | fields)


def test_ids_and_plan_must_fit():
    rows = sgd.Plan(examples=12, lot=2, steps=3, clip=1.0, noise=1.0, delta=1e-5)
    with pytest.raises(InvalidArgument, match="want person="):
        begin(people_plan(), None)
    with pytest.raises(InvalidArgument, match="3 people; want the plan's people=4"):
        begin(people_plan(), np.arange(12) % 3)
    with pytest.raises(InvalidArgument, match="with a plan for examples"):
        begin(rows, np.arange(12) % 4)


def test_a_person_account_takes_plans_for_people_only(tmp_path):
    rows = sgd.Plan(examples=12, lot=2, steps=3, clip=1.0, noise=1.0, delta=1e-5)
    with Ledger.open(tmp_path / "book.sqlite") as book:
        people = book.account("people", budget=Budget(50.0, 1e-3), unit=Unit.PERSON)
        examples = book.account("examples", budget=Budget(50.0, 1e-3))
        with pytest.raises(InvalidArgument, match="protects one example; account 'people' wants one person"):
            begin(rows, None, account=people)
        with pytest.raises(InvalidArgument, match="protects one person; account 'examples' wants one example"):
            begin(people_plan(), np.arange(12) % 4, account=examples)
        assert not [*people.history(), *examples.history()]
        begin(people_plan(), np.arange(12) % 4, account=people)
        assert len([*people.history()]) == 1


def test_a_validation_that_protects_rows_is_refused_beside_a_plan_for_people():
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    model = nn.Linear(4, 3)
    trainer = sgd.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), MEAN, people_plan(), progress=False,
        validation=Budgeted((x, y), noise=3.0),
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="validation: protects one example; want one person"):
        trainer.fit((x, y), person=np.arange(12) % 4)


def test_the_classifier_takes_groups():
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(300, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    groups = np.arange(300) % 100
    model = sgd.PrivateClassifier(classes="public", epsilon=8.0, delta=1e-3, rows_per_group=2, seed=1).fit(
        x, y, groups=groups
    )
    assert model.plan_.people == 100
    assert model.plan_.rows_per_person == 2
    assert settled_unit(model.event_) is Unit.PERSON
    assert model.score(x, y) > 0.8


def test_the_audit_of_worst_case_people_does_not_exceed_the_claim():
    """A person whose 30 rows all push one way, against the same data without: one step, as a black box.

    `lower_bound` is right with probability 0.9999, over a seed that is fixed; with a third of the noise, or rows
    clipped one by one, the same runs refute the claim.
    """
    plan = sgd.Plan(people=2, lot=2, rows_per_person=30, steps=1, clip=1.0, noise=1.0, delta=1e-5)
    rows = [30, 30]
    x = torch.cat([torch.full((30, 1), 100.0), torch.zeros(30, 1)]).double()
    y = torch.zeros(60, 1).double()

    def outcomes(with_person, trials, noise, clipped_by_rows=False):
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(model.weight, 1.0)
        own = slice(0, 60) if with_person else slice(30, 60)
        counts = rows if with_person else rows[1:]
        loss = nn.MSELoss()
        per = None if clipped_by_rows else counts
        total = float(clipped_sum(model, loss, (x[own], y[own]), clip=1.0, rows=per).sums["weight"])
        return total + noise * np.random.default_rng(7 + with_person).normal(size=trials)

    def bound(noise, **how):
        found = lower_bound(
            lambda value, count: outcomes(value, count, noise, **how), True, False, trials=40_000, delta=1e-5,
            confidence=0.9999,
        )  # fmt: skip
        return found.epsilon

    claim = plan.epsilon
    assert 0.4 * claim < bound(1.0) <= claim
    assert bound(0.3) > claim
    assert bound(1.0, clipped_by_rows=True) > claim


@pytest.mark.parametrize("sampling", [sgd.Poisson(), sgd.Shuffled()])
def test_correlated_noise_for_people(sampling):
    fields = {"lot": 10, "steps": 20, "clip": 1.0, "noise": 2.0, "delta": 1e-5, "sampling": sampling}
    people = sgd.Plan(people=100, rows_per_person=3, correlated=sgd.Banded(bands=4), **fields)
    rows = sgd.Plan(examples=100, correlated=sgd.Banded(bands=4), **fields)
    assert settled_unit(people.event) is Unit.PERSON
    assert people.epsilon == rows.epsilon
    with pytest.raises(InvalidArgument, match="bands"):
        sgd.Plan(people=100, rows_per_person=3, correlated=sgd.Banded(bands=11), **fields)


def test_adaptive_clipping_counts_people():
    plan = people_plan(people=10, lot=10, clip=sgd.Adaptive(initial=10.0), rows_per_person=4)
    model = nn.Linear(4, 3)
    release = StepRelease(dict(model.named_parameters()), plan, Key.seeded(1))
    x, y = torch.zeros(40, 4), torch.arange(40) % 3  # nobody's gradient is beyond the bound
    release.add(clipped_sum(model, MEAN, (x, y), clip=release.rule, rows=[4] * 10), people=10)
    assert release._within == 5.0  # half of ten people, not of forty rows
    with pytest.raises(InvalidArgument, match="40 clipped gradients for 10 people"):
        release.add(clipped_sum(model, MEAN, (x, y), clip=release.rule), people=10)


@pytest.mark.parametrize("options", [{"microbatch": 2}, {"microbatch": 7}, {"memory": 1e4}])
def test_microbatches_keep_people_whole(options):
    x, y = torch.randn(40, 4).double(), torch.arange(40) % 3
    sums = []
    for how in ({}, options):
        torch.manual_seed(1)
        model = nn.Linear(4, 3).double()
        plan = sgd.Plan(people=10, lot=10, rows_per_person=3, steps=1, clip=0.2, noise=0.0, delta=1e-5, seed=3)
        sums += run_loop(model, (x, y), plan, person=np.repeat(np.arange(10), 4), **how)
    assert torch.allclose(sums[0].gradient, sums[1].gradient, rtol=1e-10)


def test_a_metric_is_each_persons_mean():
    """One person's forty rows count as one number, as its one row does."""
    x, y = torch.randn(41, 4), torch.arange(41) % 3
    ids = np.array([0] * 40 + [1])
    plan = people_plan(people=2, lot=2, rows_per_person=40, steps=1, noise=0.0, metrics=(sgd.Metric(high=100.0),))
    model = nn.Linear(4, 3)
    losses = nn.CrossEntropyLoss(reduction="none")(model(x), y).detach()
    (turn,) = run_loop(model, (x, y), plan, person=ids)
    assert turn.step.metrics["loss"] == pytest.approx(float(losses[:40].mean() + losses[40]) / 2, rel=1e-5)


@pytest.mark.parametrize("metric", [sgd.Metric(high=100.0), sgd.Metric.accuracy()])
def test_a_metric_moves_by_one_number_for_a_person(metric):
    x, y = torch.randn(41, 4), torch.arange(41) % 3
    model = nn.Linear(4, 3)
    values = []
    for rows, people in ((41, 2), (40, 1)):
        ids = np.array([0] * 40 + [1])[:rows]
        plan = people_plan(people=people, lot=people, rows_per_person=40, steps=1, noise=0.0, metrics=(metric,))
        (turn,) = run_loop(model, (x[:rows], y[:rows]), plan, person=ids, optimizer=make_optimizer(model, 0.0))
        values.append(people * (turn.step.metrics[metric.name] - metric.middle))
    assert 0.0 < abs(values[0] - values[1]) <= metric.radius * (1 + 1e-5)
