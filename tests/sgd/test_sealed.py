"""Of runs that go on from one file, none releases a step with sums other than another's: wherever they die or meet."""

import contextlib
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from terrine.sgd.redone import Notes
from terrine.sgd.sealed import SealedFile

from terrine.common.keys import Key
from terrine.errors import InvalidArgument, OutOfOrder, TerrineError

STEPS = 4


class Run:
    """What a training does with its file; `sums` stands for its gradients, `released` for what the world sees."""

    def __init__(self, path, sums, released):
        self.file, self.sums, self.released = SealedFile(path, {"taken"}), sums, released
        loaded = self.file.load("plan")
        self.taken = 0 if loaded is None else loaded.record["taken"]
        self.key = Key.fresh() if loaded is None else loaded.key
        self.fresh, self.moves = loaded is None, iter(()) if self.key is None else self._moves()

    def _moves(self):
        """A generator that stops after each; every second step is saved."""
        self.file.take_over(self.taken)
        yield
        if self.fresh:
            self.save()
            yield
        while self.taken < STEPS:
            self.file.before_release(self.taken, {"w": torch.full((3,), self.sums)})
            yield
            self.released.setdefault((self.key.secret, self.taken), set()).add(self.sums)
            self.taken += 1
            if self.taken % 2 == 0:
                self.save()
                yield
        self.file.finish({"plan": "plan", "taken": self.taken})

    def save(self):
        self.file.save({"plan": "plan", "taken": self.taken}, self.taken, self.key, {})


class Killed(BaseException):
    """The process is gone."""


def kill(monkeypatch, moment):
    """Die right before the so-manyth thing that is done to a file."""
    left = itertools.count(moment, -1)

    def mortal(method):
        def called(*arguments, **named):
            if next(left) == 0:
                raise Killed
            return method(*arguments, **named)

        return called

    for owner, names in ((os, ["replace", "fsync"]), (Path, ["unlink"]), (Notes, ["_sign", "_append", "forget"])):
        for name in names:
            monkeypatch.setattr(owner, name, mortal(getattr(owner, name)))


@pytest.mark.parametrize("later", [1.0, 2.0], ids=["same sums", "other sums"])
def test_killed_between_any_two_writes_no_step_comes_out_twice(tmp_path, later):
    for moment in itertools.count():
        path, released = tmp_path / f"{moment}.pt", {}
        with pytest.MonkeyPatch.context() as patched:
            kill(patched, moment)
            try:
                list(Run(path, 1.0, released).moves)
                break
            except Killed:
                pass
        again = Run(path, later, released)
        with contextlib.nullcontext() if later == 1.0 else contextlib.suppress(InvalidArgument):
            list(again.moves)
        assert all(len(one) == 1 for one in released.values())
        if later == 1.0:
            again.file.clear()  # as whoever opens a run that is over does
            assert [one.name for one in tmp_path.glob(f"*{moment}.pt*")] == [path.name]
    assert moment > 30


@pytest.mark.parametrize("seed", range(40))
def test_however_two_take_turns_no_step_comes_out_twice(tmp_path, seed):
    path, released, chance = tmp_path / "run.pt", {}, random.Random(seed)
    runs = [Run(path, 1.0, released)]
    for _ in range(60):
        if chance.random() < 0.2:
            runs.append(Run(path, chance.choice([1.0, 2.0]), released))  # reads now, and goes on later
        with contextlib.suppress(TerrineError):
            next(chance.choice(runs[-3:]).moves, None)
    assert released
    assert all(len(one) == 1 for one in released.values())


def begun(path, moves):
    """A run after so many moves: taking over, the first save, a step, a step, a save, ..."""
    run = Run(path, 1.0, {})
    list(itertools.islice(run.moves, moves))
    return run


def test_one_who_read_an_older_file_is_refused_and_disturbs_nobody(tmp_path):
    first, second = begun(tmp_path / "run.pt", 2), Run(tmp_path / "run.pt", 2.0, {})
    list(itertools.islice(first.moves, 3))  # to the save after two steps
    with pytest.raises(OutOfOrder, match="another run went on"):
        next(second.moves)
    list(first.moves)
    assert [one.name for one in tmp_path.iterdir()] == ["run.pt"]


def test_an_older_copy_in_place_of_the_file_is_refused(tmp_path):
    """The notes of the steps that it would repeat are gone."""
    path = tmp_path / "run.pt"
    first = begun(path, 2)
    shutil.copy(path, tmp_path / "old")
    list(itertools.islice(first.moves, 3))
    shutil.copy(path, tmp_path / "new")
    shutil.copy(tmp_path / "old", path)
    with pytest.raises(InvalidArgument, match=r"saved after 2 steps.* older copy, of 0") as refused:
        next(Run(path, 2.0, {}).moves)
    assert "\n" not in str(refused.value)
    shutil.copy(tmp_path / "new", path)
    list(Run(path, 1.0, {}).moves)


def test_a_save_in_between_keeps_the_notes_of_steps_that_may_be_repeated(tmp_path):
    begun(tmp_path / "run.pt", 3)
    again = Run(tmp_path / "run.pt", 2.0, {})
    again.file.take_over(0)
    again.save()
    with pytest.raises(InvalidArgument, match="step 1 was taken before"):
        again.file.before_release(0, {"w": torch.full((3,), 2.0)})


def test_files_that_cannot_be_read_are_refused_in_words(tmp_path):
    begun(tmp_path / "run.pt", 2)
    (tmp_path / "run.pt.key").unlink()
    (tmp_path / "run.pt.key").mkdir()
    with pytest.raises(OutOfOrder, match="could not be read"):
        Run(tmp_path / "run.pt", 1.0, {})
