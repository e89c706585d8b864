"""Loops that are left, nested, broken off or tampered with: no lot is used twice, and no step is taken unbilled."""

import copy

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.errors import InvalidArgument, OutOfOrder

CRITERION = nn.CrossEntropyLoss()


def begin(small, model=None, *, steps=6, **options):
    """A model that moves by what each step releases, its optimizer and the lots."""
    changes = {name: options.pop(name) for name in ("noise", "clip", "lot") if name in options}
    given = {"examples": 12, "lot": 6, "clip": 0.7, "noise": 1.0, "delta": 1e-5, "seed": 1}
    plan = sgd.Plan(steps=steps, **{**given, **changes})
    model = model or nn.Linear(4, 3)
    return sgd.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), small, plan, **options)


def turn(model, optimizer, x, y):
    optimizer.zero_grad()
    CRITERION(model(x), y).backward()
    optimizer.step()


class TestOneLoopAtATime:
    def test_a_newer_loop_ends_the_older(self, small):
        model, optimizer, lots = begin(small)
        older, newer = iter(lots), iter(lots)
        turn(model, optimizer, *next(older))
        turn(model, optimizer, *next(newer))
        with pytest.raises(OutOfOrder, match="one loop at a time"):
            next(older)
        for lot in newer:
            turn(model, optimizer, *lot)
        assert lots.run.step.taken == 6
        assert lots.epsilon == lots.run.step.plan.epsilon

    def test_lots_beside_themselves_are_refused(self, small):
        model, optimizer, lots = begin(small)
        pairs = zip(lots, lots, strict=True)
        turn(model, optimizer, *next(pairs)[1])
        with pytest.raises(OutOfOrder, match="one loop at a time"):
            next(pairs)
        assert lots.run.step.taken == 2

    def test_no_step_is_taken_beyond_the_last_whatever_was_handed_out(self, small):
        model, optimizer, lots = begin(small)
        x, y = next(iter(lots))
        CRITERION(model(x), y).backward()
        lots.run.step.taken = 6
        with pytest.raises(OutOfOrder, match="all 6 steps"):
            optimizer.step()

    def test_a_plan_does_not_price_more_steps_than_it_has(self, small):
        plan = begin(small)[2].run.step.plan
        assert plan.event_after(6) == plan.event
        for steps in (7, -1):
            with pytest.raises(InvalidArgument, match="steps"):
                plan.event_after(steps)


def moved(small, *, interrupted, **options):
    """How far the sums of the first step reach, of examples whose gradients all agree."""
    x, y = torch.ones_like(small[0]), torch.zeros_like(small[1])
    model, optimizer, lots = begin((x, y), nn.Linear(4, 3, bias=False), noise=0.0, clip=1e-3, lot=12, **options)
    before = model.weight.detach().clone()
    if interrupted:
        for place, lot in enumerate(lots):
            turn(model, optimizer, *lot)
            if place == 1:
                break
        assert lots.run.step.taken == 0
    for lot in lots:
        turn(model, optimizer, *lot)
        if bool((model.weight != before).any()):
            break
    return lots, float((model.weight.detach() - before).norm()) * 12 / 0.1 / 1e-3


@pytest.mark.parametrize("options", [{"piece": 3}, {"memory": 6 * 3 * 3 * 4}])
def test_the_pieces_of_a_lot_that_was_broken_off_are_forgotten_and_the_lot_is_used_up(small, options):
    lots, whole = moved(small, interrupted=False, **options)
    assert lots.run.step.taken == 1
    lots, after = moved(small, interrupted=True, **options)
    assert lots.run.step.taken == 2
    assert whole == pytest.approx(12, rel=1e-4)
    assert after == pytest.approx(12, rel=1e-4)


def seen(x):
    return tuple(x.detach().flatten().tolist())


def test_a_step_that_failed_uses_its_lot_up(small):
    """The lot of each step is the one that the plan draws for it, and no other step's."""
    model, optimizer, lots = begin(small)
    run, stepped = lots.run, {}
    for turns in (3, 99):
        for place, (x, y) in enumerate(lots):
            CRITERION(model(x), y).backward()
            if run.step.taken == 1:
                with pytest.raises(InvalidArgument, match="each example may count once"):
                    CRITERION(model(x), y).backward()
            else:
                stepped[run.step.taken] = seen(x)
                optimizer.step()
            if place + 1 == turns:
                break
    assert sorted(stepped) == [0, 2, 3, 4, 5]
    plan = run.step.plan
    for step, found in stepped.items():
        drawn = plan.sampling.draw(run.step.key, step, examples=plan.examples, lot=plan.lot)
        assert found == seen(small[0][drawn])


def test_an_optimizer_that_fails_after_the_release_uses_its_lot_up(small):
    model, optimizer, lots = begin(small, steps=3)

    def fail(*_):
        raise ArithmeticError

    for place, (x, y) in enumerate(lots):
        assert lots.run.step.taken == place
        CRITERION(model(x), y).backward()
        if place == 0:
            hook = optimizer.register_step_post_hook(fail)
            with pytest.raises(ArithmeticError):
                optimizer.step()
            hook.remove()
        else:
            optimizer.step()
    assert lots.run.step.taken == 3


def test_a_run_that_is_resumed_goes_on_after_the_lots_that_were_used_up(small, tmp_path):
    keep = sgd.checkpoint.Checkpoint(tmp_path / "run.pt", every=1)
    model, optimizer, lots = begin(small, checkpoint=keep)
    handed = []
    for x, y in lots:
        handed.append(seen(x))
        CRITERION(model(x), y).backward()
        if len(handed) == 2:
            with pytest.raises(InvalidArgument):
                CRITERION(model(x), y).backward()
            continue
        optimizer.step()
        if len(handed) == 4:
            break
    _, _, lots = begin(small, checkpoint=sgd.checkpoint.Checkpoint(tmp_path / "run.pt", every=1))
    assert lots.run.step.taken == 3  # the fourth step was taken after the last save, and is repeated as it was
    assert seen(next(iter(lots))[0]) == handed[3]


def add_scale(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]})


def add_layer(model, optimizer):
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def append_layer(model, optimizer):
    model.append(nn.Linear(3, 3))


def unfreeze(model, optimizer):
    model[0].requires_grad_(True)


def freeze(model, optimizer):
    model[1].bias.requires_grad_(False)


def replace(model, optimizer):
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    optimizer.param_groups[0]["params"][2] = model[1].weight


class TestParametersThatChangeDuringTheRun:
    """Nothing would clip their gradients, or nothing would train them: both are refused."""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (add_scale, "1 more parameters"),
            (add_layer, r"2\.bias, 2\.weight: added"),
            (append_layer, r"2\.bias, 2\.weight: added"),
            (unfreeze, r"0\.bias, 0\.weight"),
            (freeze, r"1\.bias: .*frozen"),
            (replace, r"1\.weight: .*replaced"),
        ],
    )
    @pytest.mark.parametrize("trainer", [False, True])
    def test_they_are_refused(self, small, change, why, trainer):
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
        if trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            plan = sgd.Plan(examples=12, lot=6, steps=3, clip=0.7, noise=1.0, delta=1e-5)
            learner = sgd.Trainer(model, optimizer, CRITERION, plan, schedule=Once(change, model, optimizer))
            with pytest.raises(InvalidArgument, match=why):
                learner.fit(small)
            return
        model, optimizer, lots = begin(small, model)
        for place, (x, y) in enumerate(lots):
            if place == 0:
                turn(model, optimizer, x, y)
                change(model, optimizer)
                held = [one for group in optimizer.param_groups for one in group["params"]]
                before = [one.detach().clone() for one in held]
                continue
            with pytest.raises(InvalidArgument, match=why):
                turn(model, optimizer, x, y)
            assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))

    def test_a_frozen_one_with_a_gradient_of_its_own_is_refused(self, small):
        model, optimizer, lots = begin(small, nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)))
        model[0].weight.grad = torch.ones_like(model[0].weight)
        x, y = next(iter(lots))
        CRITERION(model(x), y).backward()
        with pytest.raises(InvalidArgument, match="1 more parameters"):
            optimizer.step()


class Once:
    """A schedule that does something after the first step."""

    def __init__(self, change, *given):
        self.change, self.given = change, given

    def step(self):
        self.change(*self.given)
        self.change = lambda *_: None


def abandoned(small, *, stepped=True):
    """A model with weights of its own, a run on which was left after one lot; and a copy that no run knows."""
    model = nn.Linear(4, 3)
    fresh = copy.deepcopy(model)
    model, optimizer, lots = begin(small, model)
    for x, y in lots:
        CRITERION(model(x), y).backward()
        if stepped:
            optimizer.step()
        break
    model.load_state_dict(fresh.state_dict())
    return model, fresh, optimizer, lots


@pytest.mark.parametrize("stepped", [True, False])
class TestARunThatWasLeft:
    def test_clipped_sums_are_right_on_its_model(self, small, stepped):
        model, fresh, *_ = abandoned(small, stepped=stepped)
        for size in (1, 2, 12):
            lot = small[0][:size], small[1][:size]
            found, expected = (sgd.clipped_sum(one, CRITERION, *lot, clip=0.3) for one in (model, fresh))
            assert all(torch.equal(found.sums[name], total) for name, total in expected.sums.items())
            assert torch.equal(found.norms, expected.norms)

    def test_a_trainer_trains_its_model(self, small, stepped):
        model, fresh, *_ = abandoned(small, stepped=stepped)
        plan = sgd.Plan(examples=12, lot=6, steps=3, clip=0.7, noise=1.0, delta=1e-5, seed=1)
        for one in (model, fresh):
            sgd.Trainer(one, torch.optim.SGD(one.parameters(), lr=0.1), CRITERION, plan, progress=False).fit(small)
        assert torch.equal(model.weight, fresh.weight)

    def test_a_new_run_takes_its_model_over(self, small, stepped):
        model, fresh, old, lots = abandoned(small, stepped=stepped)
        for one in (model, fresh):
            _, optimizer, newer = begin(small, one)
            for lot in newer:
                turn(one, optimizer, *lot)
        assert torch.equal(model.weight, fresh.weight)
        with pytest.raises(OutOfOrder, match="another private run"):
            old.step()
        with pytest.raises(OutOfOrder, match="another private run"):
            next(iter(lots))

    def test_a_run_on_a_larger_model_takes_it_over(self, small, stepped):
        model, fresh, old, _ = abandoned(small, stepped=stepped)
        for one in (model, fresh):
            whole, optimizer, lots = begin(small, nn.Sequential(one))
            for lot in lots:
                turn(whole, optimizer, *lot)
        assert torch.equal(model.weight, fresh.weight)
        with pytest.raises(OutOfOrder, match="another private run"):
            old.step()

    def test_its_model_trains_as_any_other_once_it_is_closed(self, small, stepped):
        model, _, old, lots = abandoned(small, stepped=stepped)
        lots.close()
        before = model.weight.detach().clone()
        turn(model, torch.optim.SGD(model.parameters(), lr=0.1), *small)
        assert not torch.equal(before, model.weight)
        with pytest.raises(OutOfOrder, match="closed"):
            old.step()
        with pytest.raises(OutOfOrder, match="closed"):
            next(iter(lots))

    def test_a_copy_of_its_model_trains_as_any_other(self, small, stepped):
        model, fresh, *_ = abandoned(small, stepped=stepped)
        twin = copy.deepcopy(model)
        for one in (twin, fresh):
            turn(one, torch.optim.SGD(one.parameters(), lr=0.1), *small)
        assert torch.equal(twin.weight, fresh.weight)


def test_a_backward_pass_that_would_move_nothing_is_refused(small):
    model, _, optimizer, _ = abandoned(small)
    optimizer.zero_grad()
    with pytest.raises(OutOfOrder, match=r"lots\.close"):
        CRITERION(model(small[0]), small[1]).backward()
    x = small[0].clone().requires_grad_()
    CRITERION(model(x), small[1]).backward()  # for the input's own sake, as a generator of examples does
    assert x.grad is not None
    assert model.weight.grad is None


def test_the_model_is_free_after_the_last_step(small):
    model, optimizer, lots = begin(small)
    for _, lot in zip(range(6), lots, strict=False):  # never asks for a lot after the last
        turn(model, optimizer, *lot)
    optimizer.zero_grad()
    CRITERION(model(small[0]), small[1]).backward()
    assert model.weight.grad is not None


def test_a_clipped_sum_inside_the_loop_changes_nothing(small, linear):
    ends = []
    for looks in (False, True):
        model, optimizer, lots = begin(small, copy.deepcopy(linear))
        for x, y in lots:
            CRITERION(model(x), y).backward()
            if looks:
                found = sgd.clipped_sum(model, CRITERION, *small, clip=0.3)
                expected = sgd.clipped_sum(copy.deepcopy(model), CRITERION, *small, clip=0.3)
                assert torch.equal(found.sums["weight"], expected.sums["weight"])
            optimizer.step()
        ends.append(model.weight.detach())
    assert torch.equal(*ends)


class Notes:
    name = "notes"

    def __init__(self):
        self.charges = []

    def charge(self, event, *, purpose, by):
        self.charges.append(event)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": 0},
        {"memory": 1e6, "piece": 3},
        {"piece": 2.5},
        {"piece": -1},
        {"piece": 0},
        {"workers": -1},
        {"workers": 0.5},
        {"criterion": "x"},
        {"checkpoint": "nowhere/run.pt"},
        {"checkpoint": 5},
    ],
    ids=str,
)
def test_nothing_is_charged_for_a_run_that_cannot_be(small, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    account = Notes()
    with pytest.raises((InvalidArgument, OutOfOrder), match=next(reversed(wrong)) + "|memory"):
        begin(small, account=account, **wrong)
    assert account.charges == []
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_charged_for_a_trainer_that_cannot_be(small):
    model = nn.Linear(4, 3)
    plan = sgd.Plan(examples=12, lot=6, steps=3, clip=0.7, noise=1.0, delta=1e-5)
    given = (model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match="criterion"):
        sgd.Trainer(*given, "x", plan)
    with pytest.raises(InvalidArgument, match="memory"):
        sgd.Trainer(*given, CRITERION, plan, memory=0)
