"""What a hostile reader did to the engine from outside, one test each."""

import collections

import pytest
import torch
from torch import nn

from terrine import accounting, sgd
from terrine.errors import InvalidArgument
from terrine.events import Budget, Composed

N = 32


def run(data, loss, model=None, steps=2, **options):
    """The sums that every step releases, without noise, every row in every lot; the parameters stay as they are."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False) if model is None else model
    metrics = options.pop("metrics", ())
    plan = sgd.Plan(examples=N, lot=N, steps=steps, clip=1.0, noise=0.0, delta=1e-5, seed=1, metrics=metrics)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sums = []
    for _ in sgd.private_steps(model, optimizer, data, plan, loss=loss, **options):
        sums.append(N * torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        optimizer.step()
    return torch.stack(sums)


class Rows(torch.utils.data.Dataset):
    def __init__(self, make, odd):
        self._make, self._odd = make, odd

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self._make(index, self._odd and index == N - 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda index, odd: {"t": 1_700_000_000 + 61 * index + (0.5 if odd else 0)},
        lambda index, odd: {"t": torch.tensor(index, dtype=torch.int64 if not odd else torch.float32)},
        lambda index, odd: {"t": index, "more": 1} if odd else {"t": index},
        lambda index, odd: {"t": [index, index]} if odd else {"t": index},
        lambda index, odd: {"t": 2**70} if odd else {"t": index},
        lambda index, odd: {"t": "a secret name"} if odd else {"t": index},
    ],
    ids=["a number that is no whole one", "another type", "another name", "another shape", "too large", "a text"],
)
def test_a_row_of_another_format_changes_nothing_for_the_others(make):
    def loss(model, batch):
        seconds = (batch["t"] % 60).float().reshape(-1, 1) / 60
        return 10 * model(seconds * torch.tensor([[1.0, -1.0, 0.5]]) + 0.5).sum()

    moved = run(Rows(make, True), loss) - run(Rows(make, False), loss)
    assert moved.norm(dim=1).max() <= 1 + 1e-5


def test_rows_of_several_formats_are_refused_before_the_charge():
    with pytest.raises(InvalidArgument, match="one format for all"):
        run(Rows(lambda index, _: torch.ones(1 + index % 3), False), lambda model, batch: model.weight.sum())


def test_what_a_metric_keeps_of_an_example_is_refused():
    kept = {"value": 0}

    def metric(model, batch):
        if (batch[0] > 0.5).any():
            kept["value"] += 1
        return 0 * model(batch[0]).sum() + kept["value"]

    with pytest.raises(InvalidArgument, match="kept"):
        run(
            (torch.ones(N, 3),),
            lambda model, batch: model(batch[0]).sum(),
            metrics=(sgd.Metric("own", 0, 1, function=metric),),
        )


class Centred(nn.Module):
    """Where a batch is evaluated as a whole, one row moves the outputs of all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) + 5 * x.mean(0, keepdim=True)[:, :2]


def test_a_private_validation_looks_at_every_row_alone():
    torch.manual_seed(0)
    x, y = torch.randn(200, 3), torch.zeros(200, dtype=torch.int64)
    model = Centred()
    scores = []
    for value in (0.0, -1e4):
        other = x.clone()
        other[7] = value
        from terrine.sgd.metrics import _right_answers

        scores.append(float(_right_answers(model, (other, y)).sum()))
    assert abs(scores[0] - scores[1]) <= 1


@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_large_numbers_hide_no_small_ones_in_a_norm(size):
    x = torch.full((1, size), 1.7e-4)
    x[0, :16] = 1.0
    label = torch.zeros(1, dtype=torch.int64)
    clipped = sgd.clipped_sum(nn.Linear(size, 2, bias=False), nn.CrossEntropyLoss(), (x, label), clip=0.1)
    assert clipped.sums["weight"].double().norm() <= 0.1 * (1 + 2e-5)


def test_a_sum_of_very_many_aligned_gradients_is_exact_enough():
    x = torch.full((20_000, 4), 3.0)
    model = nn.Linear(4, 1, bias=False)

    def total(rows):
        return sgd.clipped_sum(model, lambda model, batch: model(batch[0]).sum(), (rows,), clip=1.0).sums["weight"]

    assert (total(x) - total(x[1:])).norm() <= 1 + 1e-3


def test_a_cache_of_the_latest_is_refused():
    latest = collections.OrderedDict((place, None) for place in range(4))

    def loss(model, batch):
        if (batch[0] > 0.5).any():
            latest.move_to_end(next(iter(latest)))
        return model(batch[0]).sum()

    with pytest.raises(InvalidArgument, match="latest"):
        run((torch.ones(N, 3),), loss)


def test_a_lot_of_one_that_fails_does_not_end_the_run():
    x, y = torch.randn(50, 3), torch.zeros(50, dtype=torch.int64)
    y[7] = 4711
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = sgd.Plan(examples=50, lot=1, steps=120, clip=1.0, noise=1.0, delta=1e-5)
    assert sum(1 for _ in sgd.private_steps(model, optimizer, (x, y), plan, loss=nn.CrossEntropyLoss())) == 120


def test_a_loss_that_fails_for_every_row_is_refused_before_the_charge():
    def loss(model, batch):
        raise ValueError("every time")

    with pytest.raises(InvalidArgument, match="fails on a made-up example"):
        run((torch.ones(N, 3),), loss)


def test_what_one_row_makes_a_program_print_ends_no_run():
    def loss(model, batch):
        if batch[0].max() > 100:
            raise ValueError(f"row out of range: {batch[0].max()}")
        return model(batch[0]).sum()

    rows = torch.ones(N, 3)
    rows[3] = 1000.0
    moved = run((rows,), loss) - run((torch.ones(N, 3),), loss)
    assert moved.norm(dim=1).max() <= 1 + 1e-5


def test_the_history_counts_the_looks_of_a_private_validation():
    torch.manual_seed(0)
    data = torch.randn(48, 3), torch.randint(2, (48,))
    plan = sgd.Plan(examples=48, lot=16, steps=6, clip=1.0, noise=1.0, delta=1e-3)

    def fit(**options):
        model = nn.Linear(3, 2)
        validation = sgd.Budgeted(data, noise=2.0, times=3)
        trainer = sgd.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), plan, validation=validation,
            progress=False,
        )  # fmt: skip
        return trainer.fit(data, **options), validation.event()

    history, looks = fit()
    assert history.epsilon == accounting.epsilon(Composed([plan.event, looks]), delta=1e-3)
    within, _ = fit(until=Budget(history.epsilon - 0.2, 1e-3))
    assert within.steps < 6
    assert within.epsilon <= history.epsilon - 0.2


def test_rows_that_were_written_to_before_another_failed_are_not_run_again():
    """Made-up rows do not get that far; the failed attempt has changed the rows of all."""

    def loss(model, batch):
        x, y = batch
        if x.abs().sum() > 10:
            x *= -3
        return nn.functional.cross_entropy(model(x), y)

    x, y = torch.full((N, 3), 7.0), torch.zeros(N, dtype=torch.int64)
    y[5] = 9
    with pytest.raises(InvalidArgument, match="writes into its example"):
        run((x, y), loss, nn.Linear(3, 2))
