"""A run that is killed goes on to the bit-identical model, and is never billed less."""

import io
import random
import runpy
import shutil
import signal
import stat
from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import torch
from terrine.sgd.lots import RowReader
from torch import nn
from torch.utils.data import Dataset

from terrine import sgd
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.checkpoint import Checkpoint

from .processes import PROCESSES

SCRIPT = str(Path(__file__).with_name("killed_run.py"))


def run(folder, killed_at=-1, moment="never"):
    """The exit code of a process that trains, and perhaps kills itself."""
    names = {"PATH": str(folder / "run.pt"), "KILLED_AT": killed_at, "MOMENT": moment, "BILL": str(folder / "bill")}
    process = PROCESSES.Process(target=runpy.run_path, args=(SCRIPT,), kwargs={"init_globals": names})
    process.start()
    process.join()
    return process.exitcode


def final(folder):
    return torch.load(folder / "run.pt.final", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder) == 0
    return final(folder)


@pytest.mark.parametrize(("killed_at", "moment"), [(1, "before"), (5, "after"), (6, "write"), (12, "after")])
def test_kill_and_resume_is_bit_identical_and_billed_once(tmp_path, uninterrupted, killed_at, moment):
    assert run(tmp_path, killed_at, moment) == -signal.SIGKILL
    assert run(tmp_path) == 0
    found = final(tmp_path)
    assert all(torch.equal(found[name], one) for name, one in uninterrupted.items())
    assert (tmp_path / "bill").read_text() == "charged\n"


def test_a_kill_before_the_first_checkpoint_bills_again_never_less(tmp_path):
    assert run(tmp_path, 0, "write") == -signal.SIGKILL
    assert run(tmp_path) == 0
    assert (tmp_path / "bill").read_text() == "charged\n" * 2


def test_a_run_goes_on_with_as_many_threads_and_the_same_pieces(tmp_path, small):
    """Sums of another order are rounded otherwise, and another model comes out."""
    path = tmp_path / "run.pt"
    torch.set_num_threads(2)
    begin(path, small)
    torch.set_num_threads(1)
    with pytest.raises(InvalidArgument, match=r"threads=2, here 1.*torch.set_num_threads\(2\)"):
        begin(path, small)
    torch.set_num_threads(2)
    with pytest.raises(InvalidArgument, match="piece=None, here 3"):
        begin(path, small, make={"piece": 3})
    with pytest.raises(InvalidArgument, match="memory=None, here 1000000"):
        begin(path, small, make={"memory": 1e6})
    begin(path, small, turns=99)
    torch.set_num_threads(1)
    _, lots = begin(path, small)  # what is over adds up nothing any more
    assert lots.run.step.taken == 5


class Notes:
    def __init__(self, name):
        self.name, self.charges = name, []

    def charge(self, event, *, purpose, by):
        self.charges.append(event)


def begin(path, small, *, plan=None, account=None, turns=2, make=None, **options):
    """A fresh model and optimizer on the run at `path`, for a few turns."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    plan = plan or sgd.Plan(examples=12, lot=6, steps=5, clip=1.0, noise=1.0, delta=1e-5)
    keep = Checkpoint(path, every=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(model, optimizer, small, plan, account, checkpoint=keep, **(make or {}))
    for turn, (x, y) in enumerate(lots):
        if turn == turns:
            break
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
    return model, lots


def test_a_fresh_key_is_kept_so_that_the_same_noise_comes_again(tmp_path, small):
    """Two copies of one interrupted run end in the same model, although no seed was given."""
    (tmp_path / "a").mkdir()
    begin(tmp_path / "a" / "run.pt", small)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, _ = begin(tmp_path / "a" / "run.pt", small, turns=99)
    two, _ = begin(tmp_path / "b" / "run.pt", small, turns=99)
    assert torch.equal(one.weight, two.weight)


class Augmented(Dataset):
    """Every reading of an example is another, by each of the global generators."""

    def __init__(self, small):
        self._small = small

    def __len__(self):
        return len(self._small[0])

    def __getitem__(self, index):
        x, y = (one[index] for one in self._small)
        return x + torch.randn(4) + torch.from_numpy(np.random.randn(4)).float() + random.random(), y


def noisy_gradients(path, data, *, workers, stop=99):
    """What each step releases, by its number, with dropout and with draws of the program's own on the way."""
    plan = sgd.Plan(examples=12, lot=6, steps=6, clip=1.0, noise=1.0, delta=1e-5, seed=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = Checkpoint(path, every=2)
    model, optimizer, lots = sgd.make_private(model, optimizer, data, plan, workers=workers, piece=4, checkpoint=keep)
    torch.randn(stop), np.random.randn(stop), random.random()
    found = {}
    for x, y in lots:
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        if model[0].weight.grad is not None:
            found[lots.run.step.taken] = model[0].weight.grad.clone()
            optimizer.zero_grad()
        if lots.run.step.taken == stop:
            break
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_repeated_step_has_its_old_gradient_whatever_was_drawn_before(tmp_path, small, workers):
    """Else the difference of the two would be the data's, without noise."""
    data = Augmented(small)
    whole = noisy_gradients(tmp_path / "whole.pt", data, workers=0)
    before = noisy_gradients(tmp_path / "run.pt", data, workers=workers, stop=3)
    after = noisy_gradients(tmp_path / "run.pt", data, workers=workers)
    assert (set(before), set(after)) == ({1, 2, 3}, {3, 4, 5, 6})
    assert torch.equal(before[3], after[3])
    assert all(torch.equal((before | after)[step], one) for step, one in whole.items())


def test_augmentations_of_a_fresh_run_differ_between_steps_and_runs(tmp_path, small):
    """The seeds come from the run's key: no two steps, and no two runs, share them."""
    data = (torch.zeros(12, 4), small[1])
    plan = sgd.Plan(examples=12, lot=12, steps=3, clip=1.0, noise=1.0, delta=1e-5)
    seen = []
    for workers in (0, 1, 1):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keep = tmp_path / f"{len(seen)}.pt"
        _, _, lots = sgd.make_private(model, optimizer, Augmented(data), plan, workers=workers, checkpoint=keep)
        seen += [x.sum().item() for x, _ in lots]
    assert len(set(seen)) == 9


def test_the_key_is_sealed_and_gone_when_the_run_is_over(tmp_path, small):
    path = tmp_path / "run.pt"
    _, lots = begin(path, small)
    key_file = tmp_path / "run.pt.key"
    secret = lots.run.step.key.secret
    assert secret not in path.read_bytes()
    assert secret.hex().encode() not in path.read_bytes()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    begin(path, small, turns=99)
    assert not key_file.exists()
    _, lots = begin(path, small, turns=99)
    assert lots.run.step.taken == 5


def test_other_data_another_plan_or_a_lost_key_is_refused(tmp_path, small):
    path = tmp_path / "run.pt"
    begin(path, small)
    changed = (small[0] + 1e-6, small[1])
    with pytest.raises(InvalidArgument, match="other data"):
        begin(path, changed)
    with pytest.raises(InvalidArgument, match="another plan"):
        begin(path, small, plan=sgd.Plan(examples=12, lot=6, steps=5, clip=1.0, noise=0.9, delta=1e-5))
    with pytest.raises(InvalidArgument, match="another key"):
        begin(path, small, seal=bytes(32))
    (tmp_path / "run.pt.key").unlink()
    with pytest.raises(InvalidArgument, match="missing"):
        begin(path, small)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InvalidArgument, match="not a checkpoint"):
        begin(path, small)


class Made(Dataset):
    """Examples in another form: what `make` makes of a row and a label."""

    def __init__(self, small, make):
        self._small, self._make = small, make

    def __len__(self):
        return len(self._small[0])

    def __getitem__(self, index):
        x, y = self._small
        return self._make(x[index], int(y[index]))


class Picture:
    """As PIL's images are: no array, but good for one."""

    def __init__(self, pixels):
        self._pixels = pixels

    @property
    def __array_interface__(self):
        return self._pixels.__array_interface__


FORMS = {
    "tensor": lambda x, y: (x, y),
    "array": lambda x, y: (x.numpy(), y),
    "numpy number": lambda x, y: (x.numpy()[0], np.int64(y)),
    "objects": lambda x, y: (np.array([str(x.tolist())], dtype=object), y),
    "mapping": lambda x, y: UserDict(inputs=x.tolist(), labels=y),
    "bytes": lambda x, y: (x.numpy().tobytes(), y),
    "image": lambda x, y: (Picture(x.numpy()), y),
    "augmented": lambda x, y: (x + torch.randn(4) + random.random() + np.random.rand(), y),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_other_examples_are_told_apart_in_every_form(small, make):
    secret = bytes(32)
    found = RowReader(Made(small, make)).fingerprint(secret)
    torch.randn(3), np.random.rand(3), random.random()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert RowReader(Made(small, make)).fingerprint(secret) == found
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert RowReader(Made((small[0] + 0.5, small[1]), make)).fingerprint(secret) != found
    assert RowReader(Made(small, make)).fingerprint(bytes(31) + b"1") != found


def test_examples_that_never_read_the_same_do_not_count(small):
    """A generator of the data set's own: a coin for each, whose two tosses often agree."""
    own = np.random.default_rng(0)
    data = Made(small, lambda x, y: (x.flip(0) if own.random() < 0.5 else x, y))
    assert len({RowReader(data).fingerprint(bytes(32)) for _ in range(20)}) == 1


def test_a_run_on_arrays_refuses_other_arrays(tmp_path, small):
    begin(tmp_path / "run.pt", Made(small, FORMS["array"]))
    with pytest.raises(InvalidArgument, match="other data"):
        begin(tmp_path / "run.pt", Made((small[0] + 100, small[1]), FORMS["array"]))
    begin(tmp_path / "run.pt", Made(small, FORMS["array"]), turns=99)


def changed(path, **fields):
    """The checkpoint with other fields, its seal as it was."""
    whole = torch.load(path, weights_only=True)
    record = torch.load(io.BytesIO(whole["record"].numpy().tobytes()), weights_only=True)
    buffer = io.BytesIO()
    torch.save(record | fields, buffer)
    whole["record"] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    torch.save(whole, path)


@pytest.mark.parametrize(
    "fields", [{"taken": 0}, {"model": {"weight": torch.full((3, 4), 7.0), "bias": torch.zeros(3)}}, {"bound": 9.0}]
)
def test_a_file_that_was_changed_is_refused(tmp_path, small, fields):
    """The noise that was drawn once must not fall on a model that somebody chose."""
    begin(tmp_path / "run.pt", small)
    changed(tmp_path / "run.pt", **fields)
    with pytest.raises(InvalidArgument, match="changed since"):
        begin(tmp_path / "run.pt", small)


def test_a_run_whose_secrets_were_taken_out_does_not_go_on(tmp_path, small):
    """It would be a second run for the price of one."""
    begin(tmp_path / "run.pt", small)
    whole = torch.load(tmp_path / "run.pt", weights_only=True)
    torch.save(whole | {"sealed": None}, tmp_path / "run.pt")
    with pytest.raises(InvalidArgument, match="after 2 of 5 steps"):
        begin(tmp_path / "run.pt", small)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"version": 1, "taken": 3}, "version 1, want 4"),
        ({"version": 4}, "without its record"),
        ({"version": 4, "record": torch.zeros(3, dtype=torch.uint8), "sealed": None}, "not a checkpoint"),
        ({"weight": torch.zeros(3)}, "version is missing"),
        ([1, 2], "version is missing"),
    ],
)
def test_a_file_that_is_no_whole_checkpoint_is_refused_in_words(tmp_path, small, content, said):
    torch.save(content, tmp_path / "run.pt")
    with pytest.raises(InvalidArgument, match=said):
        begin(tmp_path / "run.pt", small)


def test_a_run_that_another_account_goes_on_with_is_charged_there_too(tmp_path, small):
    first, second = Notes("first"), Notes("second")
    begin(tmp_path / "run.pt", small, account=first)
    begin(tmp_path / "run.pt", small, account=first)
    assert len(first.charges) == 1
    begin(tmp_path / "run.pt", small, account=second)
    assert len(second.charges) == 1


def test_a_ledger_is_charged_once_and_another_of_the_same_name_again(tmp_path, small):
    from terrine.events import Budget
    from terrine.ledger import Ledger

    def account(name):
        return Ledger.open(tmp_path / name).account("patients", budget=Budget(epsilon=50.0, delta=1e-5))

    for _ in range(3):
        begin(tmp_path / "run.pt", small, account=account("one.db"), turns=1)
    assert len(list(account("one.db").history())) == 1
    begin(tmp_path / "run.pt", small, account=account("two.db"), turns=1)
    assert len(list(account("two.db").history())) == 1


def test_a_seal_of_ones_own_leaves_no_key_on_disk(tmp_path, small):
    begin(tmp_path / "run.pt", small, seal=bytes(range(32)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.pt", "run.pt.steps"]  # no run.pt.key
    _, lots = begin(tmp_path / "run.pt", small, seal=bytes(range(32)), turns=99)
    assert lots.run.step.taken == 5
    with pytest.raises(InvalidArgument, match="32"):
        begin(tmp_path / "other.pt", small, seal=b"short")


def test_a_place_that_cannot_be_written_is_an_error_before_training(tmp_path, small):
    with pytest.raises(OutOfOrder, match="could not be written"):
        begin(tmp_path / "nowhere" / "run.pt", small)
