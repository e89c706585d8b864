"""A run that ends at any moment goes on after what it has released: no step is released twice, none for free."""

import contextlib
import copy
import errno
import itertools
import os
import random
import runpy
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from terrine import files, sgd
from terrine.common.correlated import CorrelatedNoise
from terrine.common.release_count import ReleaseCount
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder
from terrine.sgd import checkpoint
from terrine.sgd.checkpoint import Checkpoint, KeptRun
from terrine.sgd.optimizers import Average
from terrine.sgd.release import StepRelease

from .processes import PROCESSES

SCRIPT = str(Path(__file__).with_name("killed_run.py"))


def plan(**options):
    return sgd.Plan(**{"examples": 12, "lot": 6, "steps": 5, "clip": 1.0, "noise": 1.0, "delta": 1e-5} | options)


class Account:
    def __init__(self, name="account", left=99):
        self.name, self.left, self.charges = name, left, []

    def charge(self, event, *, purpose, by):
        if not self.left:
            raise BudgetExceeded("nothing left")
        self.charges.append(event)


def begin(path, data, *, model=None, optimizer=torch.optim.SGD, every=1, **options):
    """A fresh model on the run at `path`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3) if model is None else model
    options = {"plan": plan(), "loss": nn.CrossEntropyLoss()} | options
    made = optimizer(model.parameters(), lr=0.1)
    return sgd.private_steps(model, made, data, checkpoint=path and Checkpoint(path, every=every), **options)


def take(steps, count=99):
    """Up to so many steps of a run; their numbers and what they released."""
    released = {}
    for step in itertools.islice(steps, count):
        steps.optimizer.step()
        released[step.number] = torch.cat([one.flatten() for one in step.gradients])
    return released


def no_gradient(model, batch):
    """What is released of it is noise alone."""
    return 0.0 * model(batch[0]).sum()


# -- killed ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


def kill(monkeypatch, moment):
    """Die right before the so-manyth thing that is done to a file, or that is released; the disk need not be quick."""
    left = itertools.count(moment, -1)

    def mortal(method):
        def called(*arguments, **named):
            if next(left) == 0:
                raise Killed
            return method(*arguments, **named)

        return called

    for owner, name in ((os, "pwrite"), (os, "open"), (Path, "unlink"), (Path, "replace"), (StepRelease, "release")):
        monkeypatch.setattr(owner, name, mortal(getattr(owner, name)))
    monkeypatch.setattr(os, "fsync", mortal(lambda file: None))
    monkeypatch.setattr("terrine.common.release_count._flush", os.fsync)
    monkeypatch.setattr("terrine.sgd.steps.charge_run", mortal(checkpoint.charge_run))


def log_run(path, data, account, released, dies_at):
    """Take all steps of a run on `path`, and put down what comes out, until it dies; -1 is never."""
    with pytest.MonkeyPatch.context() as patched:
        kill(patched, dies_at)
        steps = begin(path, data, account=account, plan=plan(steps=3), loss=no_gradient)
        for step in steps:
            released.append((step.number, step.gradients[0].numpy().tobytes()))
            steps.optimizer.step()


@pytest.mark.parametrize("first", range(5))
def test_killed_at_any_seam_no_step_comes_out_twice_or_unbilled(tmp_path, small, first):
    """All noise is told apart, as the loss has no gradient."""
    for moment in itertools.count(first, 5):
        path, released, account = tmp_path / f"{moment}.pt", [], Account()
        with contextlib.suppress(Killed):
            log_run(path, small, account, released, moment)
        is_whole = len(released) == 3
        log_run(path, small, account, released, -1)
        numbers, noises = zip(*released, strict=True)
        assert list(numbers) == sorted(set(numbers))
        assert numbers[-1] <= ReleaseCount(path.with_name(path.name + ".count")).number == 3
        assert len(set(noises)) == len(noises)
        assert 1 <= len(account.charges) <= 2  # twice if it died between the charge and the first save
        if is_whole and moment > 50:
            break


def launch(folder, *, bands=1, steps=20, every=None):
    """A process that trains on the run in `folder`, and logs what it releases."""
    names = {"PATH": "run.pt", "LOG": "log", "BILL": "bill"}
    names = {name: str(folder / file) for name, file in names.items()}
    names |= {"BANDS": bands, "STEPS": steps, "EVERY": every}
    process = PROCESSES.Process(target=runpy.run_path, args=(SCRIPT,), kwargs={"init_globals": names})
    process.start()
    return process


def check_log(folder, steps):
    """No step twice, none beyond the plan or the count, none with the noise of another; how many came out."""
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    numbers, noises = [int(number) for number, _ in lines], [noise for _, noise in lines]
    assert numbers == sorted(set(numbers))
    assert len(set(noises)) == len(noises)
    content = (folder / "run.pt.count").read_bytes()
    assert numbers[-1] <= int.from_bytes(content[-8:], "big") <= steps
    return len(numbers)


def test_a_killed_process_lets_another_go_on(tmp_path):
    first = launch(tmp_path, steps=10**6)
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    with pytest.raises(OutOfOrder, match="another run"):
        ReleaseCount(tmp_path / "run.pt.count")
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    before = check_log(tmp_path, 10**6)
    shutil.copy(tmp_path / "log", tmp_path / "before")
    second = launch(tmp_path, steps=10**6)
    while (tmp_path / "log").read_bytes() == (tmp_path / "before").read_bytes():
        time.sleep(0.01)
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    assert check_log(tmp_path, 10**6) > before
    assert (tmp_path / "bill").read_text() == "charged\n"


@pytest.mark.parametrize("bands", [1, 3])
def test_killed_200_times_at_random_moments(tmp_path, bands):
    """Twice 100 times: a quarter while a process starts, the others among its steps."""
    chance, steps = random.Random(bands), 10**6
    log, bill = tmp_path / "log", tmp_path / "bill"
    log.touch()
    for _ in range(100):
        size = log.stat().st_size
        process = launch(tmp_path, bands=bands, steps=steps, every=chance.choice([None, 1, 7]))
        if chance.random() < 0.25:
            time.sleep(chance.random())
        else:
            while log.stat().st_size == size:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.3)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if log.stat().st_size:
            check_log(tmp_path, steps)
    charges = len(bill.read_text().splitlines())
    print(f"bands={bands}: killed 100 times, {check_log(tmp_path, steps)} steps released, charged {charges} times")
    assert charges <= 2


@pytest.mark.parametrize("moment", ["count", "release"])
def test_interrupted_between_the_count_and_the_release_the_step_is_spent(tmp_path, small, monkeypatch, moment):
    account = Account()
    steps = begin(tmp_path / "run.pt", small, account=account)
    take(steps, 2)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*((ReleaseCount, "advance") if moment == "count" else (StepRelease, "release")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    with pytest.raises(OutOfOrder, match="closed"):
        next(steps)
    again = begin(tmp_path / "run.pt", small, account=account)
    assert again.number == (2 if moment == "count" else 3)
    assert sorted(take(again)) == ([3, 4, 5] if moment == "count" else [4, 5])
    assert len(account.charges) == 1


# -- one run at a time ---------------------------------------------------------------------------------------


def test_a_second_run_is_refused_until_the_first_is_closed(tmp_path, small):
    first = begin(tmp_path / "run.pt", small)
    released = take(first, 2)
    os.link(tmp_path / "run.pt.count", tmp_path / "other.pt.count")
    shutil.copy(tmp_path / "run.pt", tmp_path / "other.pt")
    for name in ("run.pt", "other.pt"):
        with pytest.raises(OutOfOrder, match="another run"):
            begin(tmp_path / name, small)
    first.close()
    second = begin(tmp_path / "run.pt", small)
    assert sorted(take(second)) == [3, 4, 5]
    with pytest.raises(OutOfOrder, match="closed"):
        first.save()
    assert sorted(released) == [1, 2]


def test_a_refusal_lets_go_of_the_files(tmp_path, small):
    """Even while its error is still at hand, as in a notebook."""
    begin(tmp_path / "run.pt", small).close()
    errors = []
    for wrong in ({"plan": plan(noise=2.0)}, {"model": nn.Linear(4, 3, bias=False)}, {"optimizer": torch.optim.Adam}):
        with pytest.raises(InvalidArgument) as refused:
            begin(tmp_path / "run.pt", small, **wrong)
        errors.append(refused.value)
    assert sorted(take(begin(tmp_path / "run.pt", small))) == [1, 2, 3, 4, 5]


def test_a_fork_takes_no_step(tmp_path, small):
    steps = begin(tmp_path / "run.pt", small)
    take(steps, 1)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            next(steps)
        except OutOfOrder:
            os.write(writer, b"refused")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 20) == b"refused"
    assert sorted(take(steps)) == [2, 3, 4, 5]


def test_a_run_has_no_copy(tmp_path, small):
    """Two would share their noise."""
    with pytest.raises(OutOfOrder, match="copied"):
        copy.deepcopy(begin(None, small))


class Slow(Dataset):
    """Reading waits until it may go on."""

    def __init__(self):
        self.is_read, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.is_read.set()
        assert self.may_go_on.wait(20)
        return torch.ones(4), 0


def test_no_step_is_taken_while_another_thread_takes_one(small):
    """Its lot would be summed with another: one example would be in there twice."""
    data = Slow()
    steps = begin(None, data, plan=plan(lot=12))
    data.is_read.clear()
    data.may_go_on.clear()
    thread = threading.Thread(target=next, args=(steps,))
    thread.start()
    assert data.is_read.wait(20)
    for ask in (steps.__next__, steps.close):
        with pytest.raises(OutOfOrder, match="under way"):
            ask()
    data.may_go_on.set()
    thread.join()
    assert sorted(take(steps)) == [2, 3, 4, 5]


def test_a_loss_that_asks_for_the_next_step_is_refused(small):
    holder = []

    def loss(model, batch):
        if holder:
            next(holder[0])
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    holder.append(begin(None, small, loss=loss))
    with pytest.raises(OutOfOrder, match="under way"):
        next(holder[0])


# -- files that do not fit -----------------------------------------------------------------------------------


def test_an_older_count_beside_a_newer_model_is_refused(tmp_path, small):
    steps = begin(tmp_path / "run.pt", small)
    take(steps, 2)
    shutil.copy(tmp_path / "run.pt.count", tmp_path / "older")
    take(steps, 2)
    steps.close()
    shutil.copy(tmp_path / "older", tmp_path / "run.pt.count")
    with pytest.raises(InvalidArgument, match="older copy") as refused:
        begin(tmp_path / "run.pt", small)
    assert "\n" not in str(refused.value)


def test_an_older_model_beside_a_newer_count_costs_steps_only(tmp_path, small):
    steps = begin(tmp_path / "run.pt", small)
    take(steps, 1)
    steps.save()
    shutil.copy(tmp_path / "run.pt", tmp_path / "older")
    take(steps, 2)
    steps.close()
    shutil.copy(tmp_path / "older", tmp_path / "run.pt")
    assert sorted(take(begin(tmp_path / "run.pt", small))) == [4, 5]


@pytest.mark.parametrize("way", ["missing", "empty", "another run's"])
def test_a_model_without_its_count_is_refused_and_no_count_is_made(tmp_path, small, way):
    take(steps := begin(tmp_path / "run.pt", small), 2)
    steps.close()
    begin(tmp_path / "other.pt", small).close()
    count = tmp_path / "run.pt.count"
    count.unlink()
    if way == "empty":
        count.touch()
    elif way == "another run's":
        shutil.copy(tmp_path / "other.pt.count", count)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="missing, or another run's"):
            begin(tmp_path / "run.pt", small)
    assert count.exists() == (way == "another run's")


def test_a_count_without_its_model_is_refused(tmp_path, small):
    take(steps := begin(tmp_path / "run.pt", small), 2)
    steps.close()
    (tmp_path / "run.pt").unlink()
    with pytest.raises(InvalidArgument, match="after 2 released steps"):
        begin(tmp_path / "run.pt", small)


@pytest.mark.parametrize(
    "wrong",
    [
        {"plan": plan(noise=0.9)},
        {"plan": plan(steps=6)},
        {"model": nn.Linear(4, 3, bias=False)},
        {"model": nn.Sequential(nn.Linear(4, 3))},
        {"optimizer": torch.optim.Adam},
    ],
    ids=["noise", "steps", "fewer parameters", "other names", "optimizer"],
)
def test_another_plan_model_or_optimizer_is_refused_and_nothing_is_charged(tmp_path, small, wrong):
    take(steps := begin(tmp_path / "run.pt", small), 2)
    steps.close()
    account = Account()
    with pytest.raises(InvalidArgument, match="another") as refused:
        begin(tmp_path / "run.pt", small, account=account, **wrong)
    assert "\n" not in str(refused.value)
    assert not account.charges


def test_a_plan_with_functions_in_it_is_the_same_after_a_restart():
    """Their addresses are others in another process."""
    first, second = (
        checkpoint.describe_plan(plan(metrics=(sgd.Metric("norm", function=lambda model, batch: batch[0].norm()),)))
        for _ in range(2)
    )
    assert first == second
    assert " at 0x" not in first


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"version": 1, "taken": 3}, "not a checkpoint"),
        ({"weight": torch.zeros(3)}, "not a checkpoint"),
        ([1, 2], "not a checkpoint"),
        (None, "not a checkpoint"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_words(tmp_path, small, content, said):
    path = tmp_path / "run.pt"
    path.write_bytes(b"nothing") if content is None else torch.save(content, path)
    with pytest.raises(InvalidArgument, match=said) as refused:
        begin(path, small)
    assert "\n" not in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("kind", ["/dev/full", "/dev/zero", "pipe", "folder", "nowhere"])
def test_a_place_that_is_no_file_is_refused_at_once(tmp_path, small, kind):
    path, account = tmp_path / "run.pt", Account()
    if kind.startswith("/dev"):
        path.symlink_to(kind)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = tmp_path / "nowhere" / "run.pt"
    with pytest.raises(OutOfOrder):
        begin(path, small, account=account)
    assert not account.charges
    assert not list(tmp_path.glob("*.count"))


def test_a_path_is_the_same_wherever_the_program_goes(tmp_path, small, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    steps = begin("run.pt", small)
    monkeypatch.chdir("elsewhere")
    take(steps, 2)
    steps.close()
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    assert sorted(take(begin("run.pt", small))) == [3, 4, 5]


def test_a_link_to_a_checkpoint_has_no_count_beside_it(tmp_path, small):
    begin(tmp_path / "run.pt", small).close()
    (tmp_path / "link.pt").symlink_to(tmp_path / "run.pt")
    with pytest.raises(InvalidArgument, match="missing"):
        begin(tmp_path / "link.pt", small)


# -- what cannot be written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_where_the_count_cannot_be_written_nothing_is_released(tmp_path, small, monkeypatch, code):
    account = Account()
    steps = begin(tmp_path / "run.pt", small, account=account)
    take(steps, 2)
    model = steps.optimizer.param_groups[0]["params"]
    before = [parameter.grad for parameter in model], [parameter.grad.clone() for parameter in model]

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        with pytest.raises(OutOfOrder, match="nothing is released"):
            next(steps)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model, before[0], strict=True))
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model, before[1], strict=True))
    again = begin(tmp_path / "run.pt", small, account=account)
    assert sorted(take(again)) == [3, 4, 5]
    assert len(account.charges) == 1


def test_where_a_replaced_count_is_found_nothing_is_released(tmp_path, small):
    steps = begin(tmp_path / "run.pt", small)
    take(steps, 2)
    shutil.copy(tmp_path / "run.pt.count", tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / "run.pt.count")
    with pytest.raises(OutOfOrder, match="replaced"):
        next(steps)


def test_where_the_model_cannot_be_written_the_run_ends_in_words_and_goes_on(tmp_path, small, monkeypatch):
    steps = begin(tmp_path / "run.pt", small)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", refuse)
        with pytest.raises(OutOfOrder, match="could not be written"):
            take(steps, 2)
        with pytest.raises(OutOfOrder, match="could not be written"):
            steps.close()
    assert sorted(take(begin(tmp_path / "run.pt", small))) == [2, 3, 4, 5]


def test_a_refused_charge_leaves_no_file(tmp_path, small):
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            begin(tmp_path / "run.pt", small, account=Account(left=0))
    assert not list(tmp_path.iterdir())


def test_files_are_their_owners_alone_and_hold_no_key(tmp_path, small):
    steps = begin(tmp_path / "run.pt", small)
    take(steps, 2)
    steps.save()
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        assert steps.release.key.secret not in file.read_bytes()


# -- the account ---------------------------------------------------------------------------------------------


def test_an_account_is_charged_once_over_any_number_of_restarts(tmp_path, small):
    first, second = Account("first"), Account("second")
    for _ in range(4):
        take(steps := begin(tmp_path / "run.pt", small, account=first), 1)
        steps.close()
    begin(tmp_path / "run.pt", small).close()  # without an account: it stays charged
    assert sorted(take(begin(tmp_path / "run.pt", small, account=first))) == [5]
    assert take(begin(tmp_path / "run.pt", small, account=first)) == {}
    assert len(first.charges) == 1
    begin(tmp_path / "run.pt", small, account=second).close()
    assert len(second.charges) == 1


def test_a_ledger_is_charged_once_and_another_of_the_same_name_again(tmp_path, small):
    from terrine.events import Budget
    from terrine.ledger import Ledger

    def account(name):
        return Ledger.open(tmp_path / name).account("patients", budget=Budget(epsilon=50.0, delta=1e-5))

    for _ in range(3):
        take(steps := begin(tmp_path / "run.pt", small, account=account("one.db")), 1)
        steps.close()
    assert len(list(account("one.db").history())) == 1
    begin(tmp_path / "run.pt", small, account=account("two.db")).close()
    assert len(list(account("two.db").history())) == 1


# -- what goes on --------------------------------------------------------------------------------------------


def test_a_seeded_run_is_the_same_from_end_to_end(tmp_path, small):
    """With a checkpoint or without."""
    runs = [take(begin(path, small, plan=plan(seed=1))) for path in (None, tmp_path / "run.pt", None)]
    for released in runs[1:]:
        assert all(torch.equal(released[number], gradient) for number, gradient in runs[0].items())


def test_a_run_that_goes_on_draws_fresh_noise_and_fresh_lots(tmp_path, small):
    """Two copies of one interrupted run share nothing; nobody can tell them apart, and each is a run of its own."""
    (tmp_path / "a").mkdir()
    begin(tmp_path / "a" / "run.pt", small, loss=no_gradient).close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, second = (take(begin(tmp_path / name / "run.pt", small, loss=no_gradient)) for name in "ab")
    assert all(not torch.equal(first[number], second[number]) for number in first)


class Noted(Dataset):
    """Which examples are read, step by step."""

    def __init__(self, examples):
        self.examples, self.read = examples, []

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        self.read.append(index)
        return torch.randn(4), index % 3


def lots_over_restarts(path, chosen, *, stops):
    """The lots of a run that ends and goes on, by the number of the step."""
    lots, data = {}, Noted(chosen.examples)
    for stop in (*stops, 99):
        steps = begin(path, data, plan=chosen)
        data.read.clear()
        for step in itertools.islice(steps, stop):
            steps.optimizer.step()
            lots[step.number] = sorted(data.read)
            data.read.clear()
        steps.close()
        if steps.number < chosen.steps:  # what a crash costs: a lot that was drawn and not released
            count = ReleaseCount(path.with_name(path.name + ".count"))
            count.advance(steps.number + 1)
            count.close()
    return lots


@pytest.mark.parametrize("sampling", [sgd.Shuffled(), sgd.FixedOrder()], ids=["shuffled", "fixed order"])
def test_an_order_is_kept_over_restarts(tmp_path, sampling):
    chosen = plan(examples=24, lot=4, steps=18, sampling=sampling)
    lots = lots_over_restarts(tmp_path / "run.pt", chosen, stops=[2, 3, 1])
    assert len(lots) == 18 - 3
    epochs = [[lot for number, lot in lots.items() if (number - 1) // 6 == epoch] for epoch in range(3)]
    for epoch in epochs:
        members = [example for lot in epoch for example in lot]
        assert len(set(members)) == len(members)  # at most once an epoch
    assert (len({tuple(lot) for lot in lots.values()}) <= 6) == isinstance(sampling, sgd.FixedOrder)


def test_groups_are_kept_over_restarts(tmp_path):
    """Turns of one example stay at least as far apart as the bands are wide."""
    chosen = plan(examples=24, lot=4, steps=18, correlated=sgd.Banded(3))
    lots = lots_over_restarts(tmp_path / "run.pt", chosen, stops=[2, 3, 1])
    turns = {}
    for number, lot in lots.items():
        for example in lot if lot != [0] else ():  # an empty one is made from the first example
            turns.setdefault(example, set()).add(number % 3)
    assert len(turns) > 12
    assert all(len(groups) == 1 for groups in turns.values())


def test_correlated_noise_begins_a_new_block(tmp_path, small):
    chosen = plan(examples=12, lot=3, steps=6, correlated=sgd.Banded(3))
    take(steps := begin(tmp_path / "run.pt", small, plan=chosen, loss=no_gradient), 2)
    steps.close()
    steps = begin(tmp_path / "run.pt", small, plan=chosen, loss=no_gradient)
    block = CorrelatedNoise(chosen.correlated, steps.release.key, steps.release.parameters.values(), first=2)
    deviation = chosen.deviation_at(2, 1.0) / chosen.lot
    for number, released in take(steps).items():
        expected = torch.cat(block.at(number - 1)) * deviation
        assert torch.allclose(released, expected, atol=2e-3 * deviation)
        assert released.abs().sum() > 0


def test_the_bound_schedules_and_averages_go_on(tmp_path, small):
    def parts(steps):
        schedule = torch.optim.lr_scheduler.ExponentialLR(steps.optimizer, 0.5)
        average = Average(0.9)
        steps.keep(schedule=schedule, average=average)
        return schedule, average

    chosen = plan(clip=sgd.Adaptive(initial=1.0))
    model = nn.Linear(4, 3)
    steps = begin(tmp_path / "run.pt", small, plan=chosen, model=model, optimizer=torch.optim.Adam)
    schedule, average = parts(steps)
    for _ in itertools.islice(steps, 3):
        steps.optimizer.step()
        schedule.step()
        average.update(model)
    bound = steps.release.bound
    steps.close()
    other = nn.Linear(4, 3)
    again = begin(tmp_path / "run.pt", small, plan=chosen, model=other, optimizer=torch.optim.Adam)
    later, mean = parts(again)
    assert bound != 1.0
    assert again.release.bound == bound
    assert later.state_dict() == schedule.state_dict()
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert torch.equal(other.weight, model.weight)
    for module, held in ((model, average), (other, mean)):
        held.exchange(module)
    assert torch.equal(other.weight, model.weight)


def test_what_is_not_asked_for_again_stays_in_the_checkpoint(tmp_path, small):
    steps = begin(tmp_path / "run.pt", small)
    steps.keep(average=(average := Average(0.9)))
    for _ in itertools.islice(steps, 2):
        average.update(nn.Linear(4, 3))
        steps.optimizer.step()
    steps.close()
    take(middle := begin(tmp_path / "run.pt", small), 2)
    middle.close()
    again = Average(0.9)
    begin(tmp_path / "run.pt", small).keep(average=again)
    assert str(again.state_dict()) == str(average.state_dict())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (3, "state_dict"),
        (SimpleNamespace(state_dict=lambda: {"best": np.float64(1.0)}, load_state_dict=print), "read again"),
    ],
)
def test_what_could_not_be_read_again_is_not_kept(tmp_path, small, other, said):
    steps = begin(tmp_path / "run.pt", small)

    def keep():
        steps.keep(other=other)
        steps.save()

    with pytest.raises(InvalidArgument, match=said):
        keep()


def test_a_run_without_a_checkpoint_keeps_nothing(small):
    with pytest.raises(OutOfOrder, match="no checkpoint"):
        begin(None, small).keep(schedule=None)


def test_a_run_that_is_over_has_its_last_model(tmp_path, small):
    model, again = nn.Linear(4, 3), nn.Linear(4, 3)
    take(begin(tmp_path / "run.pt", small, model=model, every=100))
    steps = begin(tmp_path / "run.pt", small, model=again)
    assert (take(steps), steps.is_over) == ({}, True)
    assert torch.equal(model.weight, again.weight)


# -- when a model is saved -----------------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless it is told otherwise; saving takes `seconds`."""

    def __init__(self, monkeypatch, seconds):
        self.now, write = 0.0, files.write

        def written(*arguments, **named):
            self.now += seconds
            write(*arguments, **named)

        monkeypatch.setattr(files, "write", written)
        monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: self.now))


def saves(path, monkeypatch, *, saving, step, steps, every=None):
    """After which steps the model is saved, where saving and a step take so many seconds."""
    clock, found = Clock(monkeypatch, saving), []
    kept = KeptRun(Checkpoint(path, every), "plan")
    kept.begin(limit=steps, looks="None", charged_to=None)
    kept.save(0, 1.0, {}, {})
    for taken in range(1, steps + 1):
        clock.now += step
        if kept.is_due(taken):
            found.append(taken)
            kept.save(taken, 1.0, {}, {})
    kept.count.close()
    return found


@pytest.mark.parametrize(
    ("saving", "step", "expected"),
    [
        (0.01, 1.0, list(range(1, 13))),  # costs a hundredth: every step
        (0.099, 1.0, [2, 4, 6, 8, 10, 12]),  # so that it takes a twentieth of the time
        (100.0, 20.0, [3, 6, 9, 12]),  # every minute, whatever it costs
    ],
)
def test_a_model_is_saved_as_often_as_costs_little_or_once_a_minute(tmp_path, monkeypatch, saving, step, expected):
    assert saves(tmp_path / "run.pt", monkeypatch, saving=saving, step=step, steps=12) == expected


def test_a_model_is_saved_each_so_many_steps_where_that_is_wanted(tmp_path, monkeypatch):
    assert saves(tmp_path / "run.pt", monkeypatch, saving=100.0, step=1.0, steps=12, every=5) == [5, 10]


def test_one_that_goes_on_is_saved_after_its_first_step(tmp_path, monkeypatch):
    saves(tmp_path / "run.pt", monkeypatch, saving=100.0, step=1.0, steps=2)
    kept = KeptRun(Checkpoint(tmp_path / "run.pt"), "plan")
    assert kept.is_due(1)
