"""private_steps: what a step releases, what is charged, what is refused before the charge, and what loops may do."""

import copy
import math
import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from terrine import sgd
from terrine.common.keys import Key, Purpose
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder
from terrine.events import Composed, Gaussian, PoissonSampled, Repeated, Reproducible
from terrine.sgd.clipping import Clipper

from .helpers import Criterion, Notes, each_turn, flatten, make_optimizer, make_plan, run_loop, whole_lots
from .oracle import loop

CRITERION = nn.CrossEntropyLoss()


def begin(model, dataset, plan=None, *, loss=CRITERION, **options):
    optimizer = options.pop("optimizer", None) or make_optimizer(model)
    return sgd.private_steps(model, optimizer, dataset, plan or make_plan(noise=1.0), loss=loss, **options)


def same_weights(turns, others):
    pairs = zip(turns, others, strict=True)
    return all(torch.allclose(one.weights[n], two.weights[n], atol=1e-6) for one, two in pairs for n in one.weights)


class TestWhatAStepReleases:
    def test_the_clipped_sum_plus_noise_over_the_expected_lot(self, small, linear):
        x, y = small
        plan = make_plan(lot=4, steps=1, noise=0.5, clip=0.7)
        key = Key.seeded(1)
        chosen = key.draw(Purpose.LOT, 0).chosen(12, 4 / 12)
        expected, _ = loop(linear, CRITERION, (x[chosen], y[chosen]), 0.7)
        key.draw(Purpose.NOISE, 0).protect(list(expected.values()), 0.5 * 0.7)
        (turn,) = run_loop(linear, small, plan)
        grid = 2.0 ** math.floor(math.log2(0.35)) * 2.0**-10
        assert torch.allclose(turn.gradient, flatten(expected) / 4, atol=grid / 4)
        assert torch.equal(flatten(turn.step.gradients), turn.gradient)
        assert turn.step.gradient_norm == pytest.approx(float(turn.gradient.norm()))

    def test_without_noise_and_clipping_it_is_plain_sgd(self, small, linear):
        x, y = small
        other = copy.deepcopy(linear)
        private = run_loop(linear, small, make_plan(clip=math.inf, steps=5))[-1]
        plain = make_optimizer(other)
        for _ in range(5):
            plain.zero_grad()
            CRITERION(other(x), y).backward()
            plain.step()
        assert all(torch.allclose(private.weights[name], one, atol=1e-6) for name, one in other.named_parameters())

    @pytest.mark.parametrize(
        "loss",
        [
            nn.CrossEntropyLoss(reduction="sum"),
            nn.CrossEntropyLoss(reduction="none"),
            functional.cross_entropy,
            lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            lambda model, batch: -model(batch[0]).log_softmax(1)[torch.arange(len(batch[1])), batch[1]].mean(),
        ],
        ids=["sum", "none", "function of torch", "function", "by hand"],
    )
    def test_every_way_to_write_a_loss_gives_the_same_steps(self, small, linear, loss):
        other, plan = copy.deepcopy(linear), make_plan(lot=4, steps=6, noise=1.0)
        assert same_weights(run_loop(linear, small, plan), run_loop(other, small, plan, loss=loss))

    def test_an_empty_lot_releases_noise(self, small):
        class Shaped(nn.Module):  # `view(len(x), -1)` cannot take a lot without rows
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 3)

            def forward(self, x):
                return self.layer(x.view(x.size(0), -1))

        plan = make_plan(lot=1, steps=30, noise=1.0)
        sizes = [len(plan.sampling.draw(Key.seeded(1), step, examples=12, lot=1)) for step in range(30)]
        assert 0 in sizes
        turns = run_loop(Shaped(), small, plan)
        assert [turn.step.number for turn in turns] == list(range(1, 31))
        assert all(bool(turn.gradient.isfinite().all() and turn.gradient.any()) for turn in turns)

    @pytest.mark.parametrize("options", [{"microbatch": 1}, {"microbatch": 5}, {"memory": 500.0}, {"workers": 2}])
    @pytest.mark.parametrize("listed", [False, True])
    def test_microbatches_memory_and_workers_change_nothing(self, small, linear, options, listed):
        other, plan = copy.deepcopy(linear), make_plan(lot=9, steps=4, noise=1.0)
        data = [(row, int(label)) for row, label in zip(*small, strict=True)] if listed else TensorDataset(*small)
        assert same_weights(run_loop(linear, small, plan), run_loop(other, data, plan, **options))

    def test_memory_limits_how_many_examples_run_at_once(self, small, linear, monkeypatch):
        x, y = torch.cat([small[0]] * 40), torch.cat([small[1]] * 40)
        together, sizes = Clipper._together, []
        monkeypatch.setattr(
            Clipper, "_together", lambda s, rows, *a: (sizes.append(rows.size), together(s, rows, *a))[1]
        )
        largest = []
        for memory in (1e9, 2000.0):
            sgd.clipped_sum(linear, CRITERION, (x, y), clip=0.5, memory=memory)
            largest.append(max(sizes))
            sizes.clear()
        assert largest[0] > 4 * largest[1]

    def test_clip_stages_scale_bound_and_noise_together(self, small, linear):
        plan = make_plan(clip=2.0, noise=1.0, steps=2, clip_stages=sgd.Stages(1.0, 0.5))
        assert plan.clip_at(1, 2.0).bound == 1.0
        assert plan.deviation_at(1, plan.clip_at(1, 2.0).bound) == 1.0
        assert len(run_loop(linear, small, plan)) == 2

    def test_a_gradient_that_is_not_finite_adds_nothing(self, small, linear):
        x, y = small
        x = torch.cat([x, torch.full((1, 4), math.nan)])
        other, steps = copy.deepcopy(linear), make_plan(lot=12)
        broken = run_loop(linear, (x, torch.cat([y, y[:1]])), whole_lots(13, clip=0.7, steps=3))
        for turn, whole in zip(broken, run_loop(other, small, steps), strict=True):
            assert torch.allclose(13 * turn.gradient, 12 * whole.gradient, atol=1e-5) or turn.step.number > 1
        assert all(bool(turn.gradient.isfinite().all()) for turn in broken)

    def test_the_same_with_a_seed_and_never_without(self, small, linear):
        ends = [
            flatten(run_loop(copy.deepcopy(linear), small, make_plan(noise=1.0, seed=seed))[-1].weights)
            for seed in (5, 5, None, None)
        ]
        assert torch.equal(ends[0], ends[1])
        assert len({tuple(one.tolist()) for one in ends}) == 3


class TestEpsilon:
    def test_it_grows_to_the_plans_own(self, small, linear):
        plan = make_plan(lot=3, noise=1.0, steps=120)
        steps = begin(linear, small, plan)
        running = [step.epsilon for step in steps]
        assert running == sorted(running)
        assert running[-1] == plan.epsilon == steps.epsilon
        assert running[0] >= plan.epsilon_after(1)
        assert steps.is_over
        assert steps.number == len(steps) == 120

    def test_it_is_infinite_without_noise(self, small, linear):
        assert all(step.epsilon == math.inf for step in begin(linear, small, make_plan()))


class TestWhatALoopMayDo:
    """Whatever it does with what was released is post-processing."""

    def test_break_and_go_on(self, small, linear):
        other, plan = copy.deepcopy(linear), make_plan(noise=1.0, steps=6)
        whole = run_loop(linear, small, plan)
        optimizer, numbers = make_optimizer(other), []
        steps = begin(other, small, plan, optimizer=optimizer)
        for _ in range(3):
            for step in steps:
                optimizer.step()
                numbers.append(step.number)
                if step.number % 2 == 0:
                    break
        assert numbers == [1, 2, 3, 4, 5, 6]
        assert all(torch.allclose(whole[-1].weights[name], one) for name, one in other.named_parameters())
        assert [step.number for step in steps] == []
        assert steps.is_over

    def test_skip_repeat_and_change(self, small, linear):
        optimizer, plan = make_optimizer(linear), make_plan(noise=1.0, steps=6)
        for step in begin(linear, small, plan, optimizer=optimizer):
            nn.utils.clip_grad_norm_(linear.parameters(), 0.1)
            for _ in range(step.number % 3):
                optimizer.step()
        assert step.number == 6
        assert step.epsilon == plan.epsilon

    def test_steps_of_several_optimizers(self, small):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        optimizer = make_optimizer(model)
        other = torch.optim.Adam(model[1].parameters())
        for _ in begin(model, small, optimizer=optimizer):
            optimizer.step()
            other.step()

    def test_evaluating_inside_changes_nothing(self, small):
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
        other, plan = copy.deepcopy(model), make_plan(noise=1.0)
        whole, optimizer = run_loop(model, small, plan), make_optimizer(other)
        for _ in begin(other, small, plan, optimizer=optimizer):
            optimizer.step()
            other.eval()
            with torch.no_grad():
                other(small[0])
            CRITERION(other(small[0]), small[1]).backward()
            sgd.clipped_sum(other, CRITERION, small, clip=0.3)
            torch.randn(5)
            other.train()
        assert all(torch.allclose(whole[-1].weights[name], one) for name, one in other.named_parameters())

    def test_zero_grad_after_the_release_is_met(self, small, linear):
        optimizer = make_optimizer(linear)
        before = copy.deepcopy(linear.state_dict())
        steps = begin(linear, small, optimizer=optimizer)
        next(steps)
        optimizer.zero_grad()
        with pytest.raises(OutOfOrder, match="zero_grad"):
            optimizer.step()
        assert all(torch.equal(before[name], one) for name, one in linear.state_dict().items())
        optimizer.zero_grad()
        next(steps)
        optimizer.step()  # the next release is there

    def test_the_optimizer_is_free_afterwards(self, small, linear):
        optimizer = make_optimizer(linear)
        for _ in begin(linear, small, optimizer=optimizer):
            optimizer.step()
        optimizer.zero_grad()
        before = linear.weight.detach().clone()
        optimizer.step()
        CRITERION(linear(small[0]), small[1]).backward()
        optimizer.step()
        assert not torch.equal(before, linear.weight)

    def test_a_run_that_is_closed_is_over(self, small, linear):
        optimizer = make_optimizer(linear)
        steps = begin(linear, small, optimizer=optimizer)
        next(steps)
        steps.close()
        with pytest.raises(OutOfOrder, match="closed"):
            next(steps)
        optimizer.zero_grad()
        optimizer.step()

    def test_a_new_run_on_the_same_model_and_optimizer(self, small, linear):
        other, optimizer = copy.deepcopy(linear), make_optimizer(linear)
        next(begin(linear, small, optimizer=optimizer))
        turns = run_loop(linear, small, make_plan(noise=1.0), optimizer=optimizer)
        assert same_weights(turns, run_loop(other, small, make_plan(noise=1.0)))

    def test_a_step_is_no_optimizer(self, small, linear):
        (step,) = begin(linear, small, make_plan(steps=1, noise=1.0))
        for name in ("step", "backward", "zero_grad"):
            with pytest.raises(AttributeError, match=r"want optimizer\.step\(\) alone"):
                getattr(step, name)
        with pytest.raises(AttributeError, match="it has number"):
            _ = step.loss

    def test_an_optimizer_that_is_never_stepped_is_mentioned_once(self, small, linear, caplog):
        for _ in begin(linear, small):
            pass
        assert caplog.text.count("not stepped") == 1

    def test_eval_mode_is_met_at_the_next_step(self, small, linear):
        steps = begin(linear, small)
        next(steps)
        linear.eval()
        with pytest.raises(InvalidArgument, match=r"model\.train\(\)"):
            next(steps)
        linear.train()
        assert next(steps).number == 2

    @pytest.mark.parametrize("late", [0, 1])
    def test_parameters_that_change_during_the_run_are_named(self, small, late):
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
        steps = begin(model, small, make_plan(noise=1.0))
        if late:
            next(steps)
        model[0].requires_grad_(True)
        with pytest.raises(InvalidArgument, match=r"0\.bias, 0\.weight: .*unfrozen"):
            for _ in steps:
                pass
        assert steps.number == late


class TestTheCharge:
    def test_the_whole_plan_is_charged_before_the_first_step(self, small, linear):
        account, plan = Notes(), make_plan(noise=1.0)
        steps = begin(linear, small, plan, account=account)
        assert account.charges == [plan.event]
        next(steps)
        assert account.charges == [plan.event]

    def test_a_refused_charge_leaves_no_run(self, small, linear, tmp_path):
        with pytest.raises(BudgetExceeded):
            begin(linear, small, account=Notes(refuse=True), checkpoint=tmp_path / "run.pt")
        assert list(tmp_path.iterdir()) == []
        assert len(run_loop(linear, small, make_plan(), account=Notes(), checkpoint=tmp_path / "run.pt")) == 3


def nothing(model, batch):
    return batch[0].sum()


def without_gradient(model, batch):
    with torch.no_grad():
        return CRITERION(model(batch[0]), batch[1])


class Broken:
    """Losses that are none."""

    unused = nothing
    no_grad = without_gradient
    three = staticmethod(lambda model, x, y: CRITERION(model(x), y))
    one = staticmethod(lambda batch: 0.0)
    text = "cross_entropy"
    kind = nn.CrossEntropyLoss
    number = staticmethod(lambda model, batch: 1.0)
    nothing_at_all = staticmethod(lambda model, batch: None)
    wrong_shape = staticmethod(lambda model, batch: (model(batch[0]) @ torch.ones(7)).sum())
    not_there = staticmethod(lambda model, batch: model.encoder(batch[0]).sum())
    own_backward = staticmethod(lambda model, batch: model(batch[0]).sum().backward())
    seeded = staticmethod(lambda model, batch: (torch.manual_seed(0), model(batch[0]).sum())[1])
    read = staticmethod(lambda model, batch: model(batch[0]).sum() * batch[0].max().item())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (Broken.unused, "uses no trained parameter"),
        (Broken.no_grad, "uses no trained parameter"),
        (Broken.three, r"want a function of\s+\(model, batch\)"),
        (Broken.one, r"want a function of\s+\(model, batch\)"),
        (Broken.text, "got str"),
        (Broken.kind, "got type"),
        (Broken.number, "want a tensor"),
        (Broken.nothing_at_all, "want a tensor"),
        (Broken.wrong_shape, "made-up example"),
        (Broken.not_there, "encoder"),
        (Broken.own_backward, "backward"),
        (Broken.seeded, "manual_seed"),
        (Broken.read, r"test_steps\.py:\d+: item\(\)"),
    ],
    ids=lambda value: "",
)
def test_a_loss_that_cannot_be_is_refused_before_the_charge(small, linear, loss, said):
    account = Notes()
    with pytest.raises(InvalidArgument, match=said) as refusal:
        begin(linear, small, loss=loss, account=account)
    assert account.charges == []
    assert "\n" not in str(refusal.value)
    assert len(run_loop(linear, small, make_plan())) == 3  # nothing of it is remembered


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (lambda x, y: (x[:5], y[:5]), "5 examples: want the plan's examples=12"),
        (lambda x, y: (x, y[:5]), "lengths"),
        (lambda x, y: Stream(), "iterable only"),
        (lambda x, y: DataLoader(TensorDataset(x, y)), "loader.dataset"),
        (lambda x, y: x, "map-style"),
        (lambda x, y: None, "map-style"),
        (lambda x, y: [(row, "a word") for row in x], "tuple|tensors"),
        (lambda x, y: (x,), "a criterion for a batch"),
    ],
)
def test_a_data_set_that_does_not_fit_is_refused_before_the_charge(small, linear, dataset, said):
    account = Notes()
    with pytest.raises(InvalidArgument, match=said):
        begin(linear, dataset(*small), account=account)
    assert account.charges == []


def hooked(model):
    model.weight.register_hook(lambda gradient: gradient)
    return model


def normalised(model):
    return sgd.fix(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))


@pytest.mark.parametrize(
    ("change", "optimizer", "said"),
    [
        (None, lambda m: make_optimizer(nn.Linear(4, 3)), r"2 parameters that the model does not.*sgd\.fix"),
        (normalised, lambda m: make_optimizer(nn.Linear(4, 3)), r"sgd\.fix\(model\) returns a copy"),
        (None, lambda m: torch.optim.SGD([m.weight], lr=0.1), "lacks bias"),
        (None, lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS"),
        (None, lambda m: "sgd", "torch.optim.Optimizer"),
        (hooked, None, "weight: a hook on the parameter"),
        (lambda m: m.eval(), None, r"model\.train\(\)"),
        (lambda m: m.requires_grad_(False), lambda m: torch.optim.SGD(m.parameters(), 0.1), "nothing to train"),
        (lambda m: nn.Sequential(m, nn.BatchNorm1d(3)), None, "1: BatchNorm1d"),
        (lambda m: nn.Sequential(m, nn.LazyLinear(3)), None, "1: LazyLinear"),
        (lambda m: m.forward, lambda m: make_optimizer(nn.Linear(4, 3)), "want a torch.nn.Module"),
        (lambda m: nn.Linear(4, 3, dtype=torch.complex64), None, "complex"),
    ],
)
def test_a_model_or_optimizer_that_does_not_fit_is_refused_before_the_charge(small, linear, change, optimizer, said):
    account = Notes()
    model = linear if change is None else change(linear)
    with pytest.raises(InvalidArgument, match=said):
        begin(model, small, optimizer=(optimizer or make_optimizer)(model), account=account)
    assert account.charges == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": 0}, {"memory": -1.0}, {"microbatch": 2.5}, {"microbatch": 0}, {"workers": -1}, {"workers": 0.5},
        {"checkpoint": "nowhere/run.pt"}, {"checkpoint": 5}, {"precision": "fp8"}, {"person": [1] * 12},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_charged_for_options_that_cannot_be(small, linear, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    account = Notes()
    with pytest.raises((InvalidArgument, OutOfOrder), match=next(iter(wrong))):
        begin(linear, small, account=account, **wrong)
    assert account.charges == []
    assert list(tmp_path.iterdir()) == []


class TestCompiledModels:
    def test_a_model_compiled_as_a_whole_trains_as_itself(self, small, linear):
        other, plan = copy.deepcopy(linear), make_plan(noise=1.0)
        turns = run_loop(torch.compile(linear), small, plan)
        for one, two in zip(turns, run_loop(other, small, plan), strict=True):
            assert torch.allclose(one.gradient, two.gradient, atol=1e-6)

    @pytest.mark.parametrize(
        ("compile_part", "said"),
        [
            (lambda model: (model.compile(), model)[1], "model: compiled in place"),
            (lambda model: nn.Sequential(torch.compile(model)), "0: .*compile"),
        ],
    )
    def test_parts_that_are_compiled_are_refused(self, small, linear, compile_part, said):
        model, account = compile_part(linear), Notes()
        with pytest.raises(InvalidArgument, match=said):
            begin(model, small, account=account)
        assert account.charges == []


class Raises(nn.Linear):
    """A model whose program fails for some examples."""

    def forward(self, x):
        if (x[:, 0] > 100).any():
            raise ValueError("an example that cannot be")
        return super().forward(x)


class TestExamplesThatFail:
    @pytest.mark.parametrize("index", [0, 5, 12])
    def test_one_adds_nothing(self, small, index):
        x, y = small
        x = torch.cat([x[:index], torch.full((1, 4), 1000.0), x[index:]])
        y = torch.cat([y[:index], y[:1], y[index:]])
        torch.manual_seed(0)
        model = Raises(4, 3)
        other = copy.deepcopy(model)
        (turn,) = run_loop(model, (x, y), whole_lots(13, clip=0.7))
        (whole,) = run_loop(other, small, whole_lots(12, clip=0.7))
        assert torch.allclose(13 * turn.gradient, 12 * whole.gradient, atol=1e-5)

    def test_a_lot_of_which_all_fail_is_released_as_any_other(self, small):
        """Raised, it would tell of the one example of a lot of one; a batch that is given by hand is one's own."""
        x, y = torch.full((12, 4), 1000.0), small[1]
        model = Raises(4, 3)
        steps = begin(model, (x, y))
        assert next(steps).number == 1
        with pytest.raises(ValueError, match="cannot be"):
            sgd.clipped_sum(model, CRITERION, (x, y), clip=1.0)


class Rows(Dataset):
    """Examples as dictionaries, as of transformers."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"inputs": self.x[index], "labels": self.y[index]}


def pad(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def dict_loss(model, batch):
    return CRITERION(model(batch["inputs"]), batch["labels"])


class TestDataSets:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_examples_that_are_dictionaries(self, small, linear, workers):
        other, plan = copy.deepcopy(linear), make_plan(lot=4, steps=5, noise=1.0)
        turns = run_loop(linear, Rows(*small), plan, loss=dict_loss, workers=workers)
        assert same_weights(turns, run_loop(other, small, plan))

    def test_a_collate_function(self, small, linear):
        def collate(rows):
            return {"inputs": torch.stack([row[0] for row in rows]), "labels": torch.tensor([row[1] for row in rows])}

        other, plan = copy.deepcopy(linear), make_plan(lot=4, steps=5, noise=1.0)
        listed = [(row, int(label)) for row, label in zip(*small, strict=True)]
        turns = run_loop(linear, listed, plan, loss=dict_loss, collate=collate)
        assert same_weights(turns, run_loop(other, small, plan))

    def test_a_collate_function_sees_one_example(self, small, linear):
        def centred(rows):
            x = torch.stack([row[0] for row in rows])
            return x - x.mean(0), torch.tensor([row[1] for row in rows])

        x = torch.cat([small[0], 1e3 * small[0][:1]])
        rows = [(row, int(label)) for row, label in zip(x, torch.cat([small[1], small[1][:1]]), strict=True)]
        sums = [
            count * run_loop(copy.deepcopy(linear), rows[:count], whole_lots(count), collate=centred)[0].gradient
            for count in (13, 12)
        ]
        assert float((sums[0] - sums[1]).norm()) <= 1.0 + 1e-5

    @pytest.mark.parametrize(
        "collate", [None, lambda rows: (pad([x for x, _ in rows]), torch.tensor([y for _, y in rows]))]
    )
    def test_padding_to_the_longest_is_refused(self, collate):
        rows = [(torch.ones(1 + index % 3, 4), 0) for index in range(12)]
        with pytest.raises(InvalidArgument, match="padded to a public length"):
            run_loop(nn.Linear(4, 3), rows, make_plan(noise=1.0), loss=lambda m, b: m(b[0]).sum(), collate=collate)


class TestRandomness:
    """Dropout masks are by place in the lot: a seed at the top of a script must not make them public."""

    def weights(self, seed, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(16, 4, generator=generator), torch.arange(16) % 3
        torch.manual_seed(0)
        return flatten(run_loop(model, data, whole_lots(16, steps=2, seed=seed), **options)[-1].weights)

    def test_masks_do_not_come_from_the_callers_seed(self):
        assert not torch.equal(self.weights(None), self.weights(None))

    def test_a_seeded_plan_draws_the_same_in_any_microbatches(self):
        assert torch.equal(self.weights(5), self.weights(5))
        assert not torch.equal(self.weights(5), self.weights(6))

    @pytest.mark.parametrize("seed", [None, 5])
    def test_the_callers_generators_go_on_as_if_nothing_had_been_drawn(self, small, seed):
        def draws(runs):
            torch.manual_seed(3), np.random.seed(3), random.seed(3)
            model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
            found = []
            for _ in each_turn(model, small, make_plan(seed=seed)) if runs else range(3):
                found += [float(torch.rand(())), np.random.rand(), random.random()]
            return found

        assert draws(True) == draws(False)

    def test_runs_side_by_side_share_no_draws(self, small):
        seen = []

        def loss(model, batch):
            return functional.dropout(model(batch[0]), 0.5).sum()

        models = [nn.Linear(4, 40) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        plan = sgd.Plan(examples=12, lot=12, steps=2, clip=1.0, noise=0.0, delta=1e-5)
        torch.manual_seed(0)
        for _ in zip(*(begin(model, small, plan, loss=loss) for model in models), strict=True):
            seen += [tuple(model.bias.grad.tolist()) for model in models]
        assert len(set(seen)) == len(seen) == 4

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this machine")
    def test_a_fork_of_a_run_takes_no_step(self, small, linear):
        steps = begin(linear, small)
        next(steps)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            answer = b"stepped"
            try:
                next(steps)
            except OutOfOrder as refused:
                answer = str(refused).encode()
            os.write(writing, answer)
            os._exit(0)
        os.waitpid(child, 0)
        assert b"forked" in os.read(reading, 1000)
        assert next(steps).number == 2


def first_number(model, batch):
    return batch[0][:, 0]


class TestMetrics:
    def measured(self, small, metrics, *, rows=12, noise=0.0, **options):
        torch.manual_seed(4)
        model = nn.Linear(4, 3)
        plan = whole_lots(rows, noise=noise, metrics=metrics, **options)
        (turn,) = run_loop(model, tuple(one[:rows] for one in small), plan)
        return model, turn.step.metrics

    def test_without_noise_they_are_means(self, small):
        torch.manual_seed(4)
        out = nn.Linear(4, 3)(small[0])
        metrics = (sgd.Metric(high=100.0), sgd.Metric.accuracy(), sgd.Metric("first", -50.0, 50.0, None, first_number))
        _, found = self.measured(small, metrics)
        assert list(found) == ["loss", "accuracy", "first"]
        assert found["loss"] == pytest.approx(float(CRITERION(out, small[1])), rel=1e-5)
        assert found["accuracy"] == pytest.approx(float((out.argmax(1) == small[1]).float().mean()), rel=1e-5)
        assert found["first"] == pytest.approx(float(small[0][:, 0].mean()), rel=1e-4)

    def test_microbatches_change_nothing(self, small, linear):
        metrics = (sgd.Metric(high=100.0), sgd.Metric.accuracy())
        values = [
            run_loop(copy.deepcopy(linear), small, whole_lots(12, metrics=metrics), microbatch=size)[0].step.metrics
            for size in (None, 1, 5)
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
        assert values[0] == pytest.approx(values[2], rel=1e-5)

    def test_values_are_clamped(self, small):
        wanted = float(small[0][:, 0].clamp(-1.0, 2.0).mean())
        assert self.measured(small, (sgd.Metric("m", -1.0, 2.0, None, first_number),))[1]["m"] == pytest.approx(wanted)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_counts_as_the_middle(self, small, bad):
        x = small[0].clone()
        x[3, 0] = bad
        others = torch.cat([small[0][:3, 0], small[0][4:, 0]]).clamp(-1.0, 2.0)
        wanted = (float(others.sum()) + 0.5) / 12
        for metric in (sgd.Metric("m", -1.0, 2.0, None, first_number), sgd.Metric("loss", -1.0, 2.0)):
            found = self.measured((x, small[1]), (metric,))[1][metric.name]
            assert math.isfinite(found)
            assert metric.name == "loss" or found == pytest.approx(wanted, rel=1e-5)

    def test_an_example_whose_metric_fails_counts_as_the_middle(self, small):
        def fails(model, batch):
            if (batch[0] > 1e3).any():
                raise ValueError
            return batch[0][:, 0]

        x = small[0].clone()
        x[3, 0] = 1e4
        others = torch.cat([small[0][:3, 0], small[0][4:, 0]]).clamp(-1.0, 2.0)
        found = self.measured((x, small[1]), (sgd.Metric("m", -1.0, 2.0, None, fails),))[1]["m"]
        assert found == pytest.approx((float(others.sum()) + 0.5) / 12, rel=1e-5)

    @pytest.mark.parametrize("value", [-1e30, -1.0, 0.3, 1e30, math.nan, math.inf])
    @pytest.mark.parametrize(
        "metric",
        [
            sgd.Metric("m", -1.0, 2.0, None, first_number),
            sgd.Metric("loss", 0.0, 5.0),
            sgd.Metric("centred", -1.0, 2.0, None, lambda m, b: b[0][:, 0] - b[0].mean()),
            sgd.Metric("largest", -1.0, 2.0, None, lambda m, b: b[0].amax() * len(b[0])),
        ],
        ids=lambda metric: metric.name if isinstance(metric, sgd.Metric) else None,
    )
    def test_one_example_moves_the_sum_by_the_radius(self, small, metric, value):
        x, y = torch.cat([small[0], torch.full((1, 4), value)]), torch.cat([small[1], small[1][:1]])
        whole, rest = (
            rows * (self.measured((x, y), (metric,), rows=rows)[1][metric.name] - metric.middle) for rows in (13, 12)
        )
        assert abs(whole - rest) <= metric.radius * (1 + 1e-4)

    def test_they_are_billed(self):
        noiseless = make_plan(noise=1.0, lot=3, seed=None)
        plan = make_plan(noise=1.0, lot=3, seed=None, metrics=(sgd.Metric(noise=4.0), sgd.Metric.accuracy()))
        parts = Composed([Gaussian(noise=1.0), Gaussian(noise=4.0), Gaussian(noise=10.0)])
        assert plan.event == Repeated(PoissonSampled(parts, rate=0.25), 3)
        assert plan.epsilon > noiseless.epsilon
        assert isinstance(make_plan(noise=1.0, metrics=sgd.Metric()).event, Reproducible)

    @pytest.mark.parametrize(("sampling", "reach"), [(sgd.Poisson(), 1.0), (sgd.FixedSize(), 2.0)])
    def test_their_noise_is_what_is_billed(self, small, sampling, reach):
        """300 releases: a deviation that is a fifth off would be noticed; false alarm below 1e-5."""
        metric = sgd.Metric("m", 0.0, 2.0, noise=3.0, function=lambda model, batch: 1.0 + 0.0 * batch[0][:, 0])
        plan = make_plan(lot=6, noise=1.0, steps=300, metrics=metric, sampling=sampling)
        model = nn.Linear(4, 3)
        values = [turn.step.metrics["m"] for turn in each_turn(model, small, plan)]
        assert np.mean(values) == pytest.approx(1.0, abs=5 * 3.0 * reach / 6 / math.sqrt(300))
        assert np.std(values) == pytest.approx(3.0 * reach / 6, rel=0.2)

    def test_they_add_no_noise_and_take_none_from_the_gradients(self, small, linear):
        other = copy.deepcopy(linear)
        plain = run_loop(linear, small, make_plan(noise=1.0))
        measured = run_loop(other, small, make_plan(noise=1.0, metrics=(sgd.Metric(), sgd.Metric.accuracy())))
        assert same_weights(plain, measured)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda: sgd.Metric("m", 1.0, 1.0), "want low < high"),
            (lambda: sgd.Metric("m", 0.0, math.inf), "both finite"),
            (lambda: sgd.Metric("m", math.nan, 1.0), "low"),
            (lambda: sgd.Metric("m", noise=0.0), "noise"),
            (lambda: sgd.Metric("m", function="loss"), "function"),
            (lambda: make_plan(metrics=("loss",)), "metrics"),
            (lambda: make_plan(metrics=(sgd.Metric(), sgd.Metric(high=1.0))), "a name of its own"),
            (lambda: make_plan(lot=3, noise=1.0, correlated=sgd.Banded(2), metrics=sgd.Metric()), "metrics"),
        ],
    )
    def test_metrics_that_cannot_be_are_refused(self, wrong, said):
        with pytest.raises(InvalidArgument, match=said):
            wrong()


def test_a_criterion_of_ones_own_and_a_tuple_of_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, first, second):
            return self.layer(first + second)

    torch.manual_seed(0)
    rows = [((torch.randn(4), torch.randn(4)), index % 3) for index in range(12)]
    turns = run_loop(Two(), rows, make_plan(noise=1.0), loss=Criterion(lambda out, y: functional.cross_entropy(out, y)))
    assert len(turns) == 3


def test_every_item_of_a_tuple_but_the_last_is_an_input():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, first, second):
            return self.layer(first + second)

    data = torch.randn(12, 4), torch.randn(12, 4), torch.arange(12) % 3
    assert len(run_loop(Two(), data, make_plan(noise=1.0))) == 3
