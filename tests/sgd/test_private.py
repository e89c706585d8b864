"""An ordinary loop, made private: what it computes, what it charges, and what it refuses."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from terrine import sgd
from terrine.common.keys import Key, Purpose
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder
from terrine.sgd.isolation import plain

from .conftest import oracle


def plan(**changes):
    given = {"examples": 12, "lot": 12, "steps": 3, "clip": 0.7, "noise": 0.0, "delta": 1e-5, "seed": 1}
    return sgd.Plan(**{**given, **changes})


def loop(model, dataset, plan, *, criterion=None, optimizer=None, backward=torch.Tensor.backward, **options):
    """The contract's loop; returns the parameters after every lot."""
    criterion = criterion or nn.CrossEntropyLoss()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(model, optimizer, dataset, plan, **options)
    seen = []
    for x, y in lots:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        backward(loss)
        optimizer.step()
        seen.append({name: one.detach().clone() for name, one in model.named_parameters()})
    return seen


class Listed(Dataset):
    """A map-style data set that is no tensor."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


def test_one_step_is_the_clipped_sum_plus_noise_over_the_expected_lot(small, linear):
    x, y = small
    made = plan(lot=4, steps=1, noise=0.5, clip=0.7)
    start = {name: one.detach().clone() for name, one in linear.named_parameters()}
    key = Key.seeded(1)
    chosen = key.draw(Purpose.LOT, 0).chosen(12, 4 / 12)
    expected = oracle(linear, nn.CrossEntropyLoss(), x[chosen], y[chosen], 0.7)
    draw = key.draw(Purpose.NOISE, 0)
    after = loop(linear, (x, y), made)[0]
    grid = 2.0 ** math.floor(math.log2(0.35)) * 2.0**-10
    draw.protect(list(expected.values()), 0.5 * 0.7)
    for name, total in expected.items():
        assert torch.allclose(after[name], start[name] - 0.1 * total / 4, atol=0.1 * grid / 4)


def test_without_noise_and_clipping_it_is_plain_sgd(small, linear):
    x, y = small
    other = nn.Linear(4, 3)
    other.load_state_dict(linear.state_dict())
    private = loop(linear, (x, y), plan(clip=math.inf, steps=5))[-1]
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(5):
        plain.zero_grad()
        nn.CrossEntropyLoss()(other(x), y).backward()
        plain.step()
    assert all(torch.allclose(private[name], one, atol=1e-6) for name, one in other.named_parameters())


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        lambda out, y: nn.functional.cross_entropy(out, y, reduction="none").mean(),
        lambda out, y: nn.functional.cross_entropy(out, y, reduction="none").sum(),
        lambda out, y: nn.functional.cross_entropy(out, y, reduction="sum") / len(y),
        lambda out, y: -(out.log_softmax(1) * nn.functional.one_hot(y, 3)).sum() / out.shape[0],
    ],
    ids=["sum", "none.mean", "none.sum", "sum over len", "by hand"],
)
def test_every_reduction_gives_the_same_steps(small, linear, criterion):
    other = nn.Linear(4, 3)
    other.load_state_dict(linear.state_dict())
    made = plan(lot=4, steps=6, noise=1.0)
    mean, this = loop(linear, small, made), loop(other, small, made, criterion=criterion)
    for one, two in zip(mean, this, strict=True):
        assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


class Doubled(torch.autograd.Function):
    """A loss that nobody can follow."""

    @staticmethod
    def forward(ctx, each):
        return 2 * each

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_loss_that_cannot_be_followed_wants_its_criterion(small, linear):
    def criterion(out, y):
        return Doubled.apply(nn.functional.cross_entropy(out, y, reduction="none")).mean()

    start = copy.deepcopy(linear)
    with pytest.raises(InvalidArgument, match="criterion=criterion"):
        loop(linear, small, plan(), criterion=criterion)
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(start, optimizer, small, plan(), criterion=criterion)
    for x, y in lots:
        expected = sgd.clipped_sum(copy.deepcopy(model), criterion, (plain(x), plain(y)), clip=0.7)
        torch.autograd.backward([criterion(model(x), y)])
        found = lots.run._lot.clipped()
        assert all(torch.allclose(found.sums[name], expected.sums[name], atol=1e-6) for name in found.sums)
        optimizer.step()
    assert lots.run.step.taken == 3


@pytest.mark.parametrize(
    "criterion",
    [
        lambda out, y: (out.T @ out).square().mean(),
        lambda out, y: nn.functional.cross_entropy(out - out.mean(0), y),
        lambda out, y: nn.functional.cross_entropy(out, y) * out.abs().max(),
    ],
    ids=["gram", "centred", "scaled by the largest"],
)
def test_a_loss_that_mixes_examples_is_refused(small, linear, criterion):
    with pytest.raises(InvalidArgument, match="mixes examples"):
        loop(linear, small, plan(), criterion=criterion)


def test_a_model_that_mixes_examples_is_refused(small):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    with pytest.raises(InvalidArgument, match="mixes"):
        loop(Centred(), small, plan())


def test_batch_norm_is_refused_by_path(small):
    with pytest.raises(InvalidArgument, match="1"):
        loop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), small, plan())


@pytest.mark.parametrize("outputs", [3, 2])
def test_an_output_without_the_examples_in_front_is_refused(small, outputs):
    class Total(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(0)

    with pytest.raises(InvalidArgument, match="first dimension"):
        loop(Total(4, outputs), small, plan(), criterion=lambda out, y: out.sum())


class Judged(nn.Module):
    """A model that returns its own loss beside its outputs, as language models do."""

    def __init__(self, reduction):
        super().__init__()
        self.layer, self.reduction = nn.Linear(4, 3), reduction

    def forward(self, x, y):
        out = self.layer(x)
        if self.reduction == "mixed":
            return {"loss": (out - out.mean(0)).square().sum(), "logits": out}
        return {"loss": nn.functional.cross_entropy(out, y, reduction=self.reduction), "logits": out}


def test_a_loss_that_the_model_returns_is_understood(small, linear):
    start = {name: one.clone() for name, one in linear.state_dict().items()}
    ends = [loop(linear, small, plan(lot=6, noise=1.0, steps=4))[-1]["weight"]]
    for reduction in ("mean", "sum"):
        model = Judged(reduction)
        model.layer.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, lots = sgd.make_private(model, optimizer, small, plan(lot=6, noise=1.0, steps=4))
        for x, y in lots:
            model(x=x, y=y)["loss"].backward()
            optimizer.step()
        ends.append(model.layer.weight.detach())
    assert torch.allclose(ends[0], ends[1], atol=1e-5)
    assert torch.allclose(ends[0], ends[2], atol=1e-5)
    model = Judged("mixed")
    _, _, lots = sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), small, plan())
    with pytest.raises(InvalidArgument, match="mixes examples"):
        model(*next(iter(lots)))


def test_a_model_may_be_trained_in_evaluation_mode(small, linear):
    other = nn.Linear(4, 3)
    other.load_state_dict(linear.state_dict())
    expected = loop(linear, small, plan(noise=1.0))[-1]
    found = loop(other.eval(), small, plan(noise=1.0))[-1]
    assert all(torch.allclose(expected[name], found[name], atol=1e-6) for name in expected)


def test_an_empty_lot_takes_a_step_of_noise_alone(small):
    class Shaped(nn.Module):  # `view(len(x), -1)` cannot take a lot without rows
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x.view(x.size(0), -1))

    made = plan(lot=1, steps=30, noise=1.0)
    sizes = [len(made.sampling.draw(Key.seeded(1), step, examples=12, lot=1)) for step in range(30)]
    assert 0 in sizes
    model = Shaped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(model, optimizer, small, made)
    for turn, (x, y) in enumerate(lots):
        assert len(x) == len(y) == sizes[turn]
        before = model.layer.weight.detach().clone()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        moved = model.layer.weight - before
        assert bool(moved.isfinite().all())
        assert bool((moved != 0).any())
    assert turn == 29


def test_split_and_whole_lots_give_the_same_steps(small, linear):
    other = nn.Linear(4, 3)
    other.load_state_dict(linear.state_dict())
    made = plan(lot=9, steps=4, noise=1.0)
    whole = loop(linear, small, made)
    pieces = loop(other, small, made, piece=2)
    assert len(pieces) > len(whole)
    assert all(torch.allclose(whole[-1][name], pieces[-1][name], atol=1e-6) for name in whole[-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_data_set_trains_like_tensors(small, linear, workers):
    other = nn.Linear(4, 3)
    other.load_state_dict(linear.state_dict())
    made = plan(lot=2, steps=12, noise=1.0)
    tensors = loop(linear, TensorDataset(*small), made)
    listed = loop(other, Listed(*small), made, workers=workers)
    assert all(torch.allclose(tensors[-1][name], listed[-1][name], atol=1e-6) for name in tensors[-1])


def test_adaptive_clipping_finds_the_quantile(small, linear):
    rule = sgd.Adaptive(initial=100.0, quantile=0.5, learning_rate=0.5, noise=10.0)
    made = plan(clip=rule, steps=60, noise=1e-9 + 0.1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.0)
    model, optimizer, lots = sgd.make_private(linear, optimizer, small, made)
    for x, y in lots:
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
    norms = sgd.clipped_sum(linear, nn.CrossEntropyLoss(), small, clip=1.0).norms
    assert float(norms.min()) / 10 < lots.run.step.bound < 10 * float(norms.max())


def test_clip_stages_scale_bound_and_noise_together(small, linear):
    made = plan(clip=2.0, noise=1.0, steps=2, clip_stages=sgd.Stages(1.0, 0.5))
    assert made.clip_at(1, 2.0).bound == 1.0
    assert made.deviation_at(1, made.clip_at(1, 2.0).bound) == 1.0
    assert len(loop(linear, small, made)) == 2


class Notes:
    name = "notes"

    def __init__(self, refuse=False):
        self.charges, self.refuse = [], refuse

    def charge(self, event, *, purpose, by):
        if self.refuse:
            raise BudgetExceeded("nothing left")
        self.charges.append(event)


def test_the_account_is_charged_the_whole_plan_before_the_first_step(small, linear):
    account, made = Notes(), plan(noise=1.0)
    _, _, lots = sgd.make_private(linear, torch.optim.SGD(linear.parameters(), lr=0.1), small, made, account)
    assert account.charges == [made.event]
    for _ in lots:
        break
    assert account.charges == [made.event]


def test_a_refused_charge_leaves_no_run(small, linear):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    with pytest.raises(BudgetExceeded):
        sgd.make_private(linear, optimizer, small, plan(), Notes(refuse=True))
    _, _, lots = sgd.make_private(linear, optimizer, small, plan(), Notes())
    assert len(lots) == 3


def test_training_stops_at_the_last_step_whatever_the_loop_does(small, linear):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(linear, optimizer, small, plan(noise=1.0))
    turns = 0
    for _ in range(2):
        for x, y in lots:
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            turns += 1
            if turns == 2:
                break
    assert turns == len(lots) == 3
    with pytest.raises(OutOfOrder, match="those of all epochs"):
        next(iter(lots))
    before = linear.weight.detach().clone()
    nn.CrossEntropyLoss()(model(small[0]), small[1]).backward()
    with pytest.raises(OutOfOrder, match="all 3 steps"):
        optimizer.step()
    assert torch.equal(before, linear.weight)


def test_one_step_for_each_lot(small, linear):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(linear, optimizer, small, plan(noise=1.0))
    with pytest.raises(OutOfOrder, match="no lot"):
        optimizer.step()
    for x, y in lots:
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        with pytest.raises(OutOfOrder):
            optimizer.step()
        break


def test_lots_that_the_loop_skips_are_used_up(small, linear):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    _, _, lots = sgd.make_private(linear, optimizer, small, plan(noise=1.0))
    assert sum(1 for _ in lots) == 3
    assert lots.run.step.taken == 3


def test_evaluating_inside_the_loop_changes_nothing(small, linear):
    other = nn.Linear(4, 3)
    other.load_state_dict(linear.state_dict())
    made = plan(noise=1.0)
    expected = loop(linear, small, made)[-1]
    model, optimizer, lots = sgd.make_private(other, torch.optim.SGD(other.parameters(), lr=0.1), small, made)
    for x, y in lots:
        nn.CrossEntropyLoss()(model(x), y).backward()
        model.eval()
        with torch.no_grad():
            model(small[0][:5])
        model.train()
        optimizer.step()
    assert all(torch.allclose(expected[name], one, atol=1e-6) for name, one in other.named_parameters())


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (lambda x, y: (x[:5], y[:5]), "5 examples: want the plan's examples=12"),
        (lambda x, y: (x, y[:5]), "lengths"),
        (lambda x, y: Stream(), "iterable only"),
        (lambda x, y: DataLoader(TensorDataset(x, y)), "loader.dataset"),
        (lambda x, y: x, "map-style"),
        (lambda x, y: None, "map-style"),
    ],
)
def test_a_data_set_that_does_not_fit_is_refused(small, linear, dataset, why):
    with pytest.raises(InvalidArgument, match=why):
        sgd.make_private(linear, torch.optim.SGD(linear.parameters(), lr=0.1), dataset(*small), plan())


def test_an_optimizer_that_does_not_fit_is_refused(small, linear):
    stranger = nn.Linear(4, 3)
    with pytest.raises(InvalidArgument, match="2 parameters that the model does not"):
        sgd.make_private(linear, torch.optim.SGD(stranger.parameters(), lr=0.1), small, plan())
    with pytest.raises(InvalidArgument, match="lacks bias"):
        sgd.make_private(linear, torch.optim.SGD([linear.weight], lr=0.1), small, plan())
    with pytest.raises(InvalidArgument, match="LBFGS"):
        sgd.make_private(linear, torch.optim.LBFGS(linear.parameters()), small, plan())
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    sgd.make_private(linear, optimizer, small, plan())
    with pytest.raises(InvalidArgument, match="another private run"):
        sgd.make_private(linear, optimizer, small, plan())


def test_a_compiled_model_is_refused_clearly(small, linear):
    with pytest.raises(InvalidArgument, match=r"torch\.compile"):
        sgd.make_private(torch.compile(linear), torch.optim.SGD(linear.parameters(), lr=0.1), small, plan())


def test_a_closure_is_refused(small, linear):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(linear, optimizer, small, plan())
    for x, y in lots:
        nn.CrossEntropyLoss()(model(x), y).backward()
        with pytest.raises(InvalidArgument, match="closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(InvalidArgument, match="closure"):
            optimizer.step(closure=lambda: 0.0)
        optimizer.step(None)
    assert lots.run.step.taken == 3


def test_a_gradient_that_is_not_finite_adds_nothing(small, linear):
    x, y = small
    x = x.clone()
    x[3] = math.nan
    after = loop(linear, (x, y), plan(noise=1.0, steps=2))[-1]
    assert all(bool(one.isfinite().all()) for one in after.values())


class TestMemory:
    """A limit in bytes cuts lots into pieces that make the same step."""

    def test_pieces_fit_and_make_the_same_steps(self, small, linear):
        made = plan(lot=8, steps=4, noise=1.0)
        whole, sizes = loop(copy.deepcopy(linear), small, made), []
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        model, optimizer, lots = sgd.make_private(linear, optimizer, small, made, memory=6 * 3 * 3 * 4)
        for x, y in lots:
            sizes.append(len(y))
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
        assert lots.run.step.taken == 4
        assert max(sizes) <= 6  # an example's output of three numbers, held three times, in four bytes each
        assert len(sizes) > 4
        assert all(torch.allclose(whole[-1][name], one, atol=1e-5) for name, one in model.named_parameters())

    def test_a_clipped_sum_takes_a_limit(self, small, linear):
        x, y = small
        seen = []
        linear.register_forward_hook(lambda _module, args, _output: seen.append(len(args[0])))
        free = sgd.clipped_sum(linear, nn.CrossEntropyLoss(), (x, y), clip=0.5, microbatch=len(y))
        seen.clear()
        tight = sgd.clipped_sum(linear, nn.CrossEntropyLoss(), (x, y), clip=0.5, memory=2 * 3 * 3 * 4)
        assert max(seen[1:]) <= 2
        assert torch.allclose(free.norms, tight.norms)

    @pytest.mark.parametrize(
        "wrong", [{"memory": 0}, {"memory": -1.0}, {"memory": 1e6, "piece": 3}, {"memory": 1e6, "workers": 2}]
    )
    def test_a_limit_that_makes_no_sense_is_refused(self, small, linear, wrong):
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        with pytest.raises(InvalidArgument, match="memory"):
            sgd.make_private(linear, optimizer, small, plan(), **wrong)


def test_a_model_that_fails_in_its_first_lot_says_only_that(linear, recwarn):
    model = nn.Sequential(linear, nn.Linear(4, 2))  # does not fit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, lots = sgd.make_private(model, optimizer, (torch.randn(12, 4), torch.zeros(12).long()), plan())
    with pytest.raises(RuntimeError):
        model(next(iter(lots))[0])
    assert not [one for one in recwarn if "forward hook" in str(one.message)]
