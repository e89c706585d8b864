"""Files and who may read them.

    private   computed from private rows without noise: 0600, in folders of 0700
    public    paid for, or made without a look at the rows: 0644, may be handed on

A file has its mode from the moment it is there, whatever the umask: it is made beside its place with 0600, written,
opened up if it is public, and renamed. So it is also whole or not there at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PRIVATE, PUBLIC, PRIVATE_FOLDER = 0o600, 0o644, 0o700


@contextmanager
def written(path: Path, *, private: bool) -> Iterator[IO[bytes]]:
    """A file to write `path` by: whole when the block ends, and not there if it raises.

    Raises:
        OSError: it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():  # said of the folder, not of the draft in it
        raise FileNotFoundError(errno.ENOENT, "no such folder; want one that is there", str(path.parent))
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.unlink(missing_ok=True)  # left by a process that was killed; nobody else's handle shall see what comes
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
            yield file
            file.flush()
            if not private:
                os.fchmod(file.fileno(), PUBLIC)
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that after a power failure, too, what came later is not there without it
    finally:
        os.close(folder)


def write(path: Path, content: bytes | str, *, private: bool) -> None:
    """All of `content` at `path`, or what was there before.

    Raises:
        OSError: it cannot be written.
    """
    with written(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def private_folder(path: Path) -> Path:
    """Make `path` a folder that its owner alone can look into; folders above it are made as usual.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(PRIVATE_FOLDER)
    return path


@contextmanager
def unmade_if_refused(*folders: Path) -> Iterator[None]:
    """Remove what folders the block made, if it raises: a refusal leaves nothing behind."""
    missing = sorted({one for path in folders for one in (path, *path.parents) if not one.exists()}, reverse=True)
    try:
        yield
    except BaseException:
        for one in missing:  # the inner ones first
            if one.is_dir() and not any(one.iterdir()):
                one.rmdir()
        raise
