"""The count of releases: on disk before each, held by one run at a time, never lower than what was released."""

import errno
import gc
import multiprocessing
import os
import stat

import pytest

from terrine.common.release_count import ReleaseCount
from terrine.errors import InvalidArgument, OutOfOrder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt.count"


def test_whoever_opens_it_again_goes_on_after_what_was_counted(path):
    count = ReleaseCount(path)
    assert (count.is_new, count.number) == (True, 0)
    count.advance(1)
    count.advance(2)
    secret = count.secret
    count.close()
    again = ReleaseCount(path)
    assert (again.is_new, again.number, again.secret) == (False, 2, secret)


def test_it_is_its_owners_alone_and_every_run_has_a_secret_of_its_own(path, tmp_path):
    first, second = ReleaseCount(path), ReleaseCount(tmp_path / "other.count")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(first.secret) == 32
    assert first.secret != second.secret


@pytest.mark.parametrize("number", [0, 1, 2])
def test_it_never_counts_backwards(path, number):
    count = ReleaseCount(path)
    count.advance(2)
    with pytest.raises(OutOfOrder):
        count.advance(number)


def test_one_run_at_a_time_holds_it_under_whatever_name(path, tmp_path):
    count = ReleaseCount(path)
    os.link(path, tmp_path / "another name")
    (tmp_path / "link").symlink_to(path)
    for name in ("run.pt.count", "another name", "link"):
        with pytest.raises(OutOfOrder, match="another run"):
            ReleaseCount(tmp_path / name)
    count.advance(1)
    count.close()
    assert ReleaseCount(tmp_path / "another name").number == 1


def test_a_run_that_nobody_can_reach_any_more_does_not_hold_it(path):
    count = ReleaseCount(path)
    count.itself = count
    gc.disable()
    try:
        del count
        assert not ReleaseCount(path).is_new
    finally:
        gc.enable()


def _stay(path, there, stop):
    there.set()
    stop.wait(30)


def test_a_fork_neither_counts_nor_keeps_the_lock(path):
    """Such as workers that read data: they may live a little longer than the run."""
    processes, count = multiprocessing.get_context("fork"), ReleaseCount(path)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            count.advance(1)
        except OutOfOrder:
            os.write(writer, b"refused")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 20) == b"refused"
    there, stop = processes.Event(), processes.Event()
    worker = processes.Process(target=_stay, args=(path, there, stop))
    worker.start()
    there.wait(30)
    with pytest.raises(OutOfOrder, match="another run"):  # the fork did not let go of it for its parent
        ReleaseCount(path)
    count.close()
    ReleaseCount(path).close()
    stop.set()
    worker.join()


def fail_writing(monkeypatch, after=0, code=errno.ENOSPC):
    """The disk fills up while so many bytes fit, or a write fails."""

    def write(file, content, at):
        if after and code == errno.ENOSPC:
            return pwrite(file, content[:after], at)
        raise OSError(code, os.strerror(code))

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", write)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_what_cannot_be_written_is_not_counted(path, monkeypatch, code):
    count = ReleaseCount(path)
    count.advance(1)
    with monkeypatch.context() as patched:
        fail_writing(patched, code=code)
        with pytest.raises(OutOfOrder, match="nothing is released"):
            count.advance(2)
    assert count.number == 1
    count.advance(2)


@pytest.mark.parametrize("number", [1, 254, 255, 256, 65535])
@pytest.mark.parametrize("written", range(1, 8))
def test_a_number_that_was_torn_in_the_middle_is_never_too_low(path, monkeypatch, number, written):
    count = ReleaseCount(path)
    count.advance(number)
    with monkeypatch.context() as patched:
        fail_writing(patched, after=written)
        with pytest.raises(OutOfOrder):
            count.advance(number + 1)
    count.close()
    assert ReleaseCount(path).number >= number


def test_a_first_write_that_was_torn_is_no_count(path, monkeypatch):
    with monkeypatch.context() as patched:
        fail_writing(patched, after=30)
        with pytest.raises(OutOfOrder):
            ReleaseCount(path)
    with pytest.raises(InvalidArgument, match="not the count"):
        ReleaseCount(path)


@pytest.mark.parametrize("size", [1, 19, 51, 58])
def test_a_count_that_was_cut_off_is_refused(path, size):
    ReleaseCount(path).close()
    os.truncate(path, size)
    with pytest.raises(InvalidArgument, match="not the count"):
        ReleaseCount(path)


def test_a_count_that_is_cut_off_while_it_is_held_is_refused_later(path):
    count = ReleaseCount(path)
    count.advance(1)
    os.truncate(path, 0)
    count.advance(2)
    count.close()
    with pytest.raises(InvalidArgument, match="not the count"):
        ReleaseCount(path)


@pytest.mark.parametrize("way", ["replaced", "removed", "moved"])
def test_nothing_is_released_once_another_file_lies_in_its_place(path, tmp_path, way):
    """As when a backup is put back: whoever goes on after a crash would read that one."""
    count = ReleaseCount(path)
    count.advance(1)
    if way == "replaced":
        (tmp_path / "copy").write_bytes(path.read_bytes())
        (tmp_path / "copy").replace(path)
    elif way == "removed":
        path.unlink()
    else:
        path.rename(tmp_path / "elsewhere")
    with pytest.raises(OutOfOrder, match="replaced or removed"):
        count.advance(2)


def test_one_that_is_removed_between_opening_and_locking_is_opened_anew(path, monkeypatch):
    """Else two would hold two files of one name."""
    first = ReleaseCount(path)
    flock = os.open

    def opened(name, *arguments):
        file = flock(name, *arguments)
        if first.is_open:
            first.remove()
        return file

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opened)
        second = ReleaseCount(path)
    assert os.path.samestat(os.fstat(second._file), path.stat())
    with pytest.raises(OutOfOrder, match="another run"):
        ReleaseCount(path)


def test_who_removes_a_count_removes_no_other(path):
    count = ReleaseCount(path)
    path.unlink()
    path.write_text("somebody else's")
    count.remove()
    assert path.read_text() == "somebody else's"


@pytest.mark.parametrize("kind", ["folder", "pipe", "/dev/full", "/dev/zero"])
def test_what_is_no_file_is_refused_at_once(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)
    with pytest.raises(OutOfOrder):
        ReleaseCount(path)


def test_a_closed_one_counts_no_more(path):
    count = ReleaseCount(path)
    count.close()
    count.close()
    with pytest.raises(OutOfOrder, match="closed"):
        count.advance(1)
