"""Fetching a data set's files from their publishers, checked before they are kept.

A file arrives beside its place, is checked against the published sum, and is then renamed: what lies in the folder is
whole. Where there is no network, one line says what to put where.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from terrine.errors import InvalidArgument

_CHUNK = 1 << 16
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_ADULT = "https://archive.ics.uci.edu/static/public/2/adult.zip"


@dataclass(frozen=True)
class Download:
    """Where a file is published, and how to get it out of what is sent."""

    address: str
    unpack: Callable[[bytes], bytes]


def source(name: str) -> Download | None:
    """Where the file `set/file` is published."""
    group, _, file = name.partition("/")
    base = os.environ.get("TERRINE_MIRROR")
    match group:
        case "mnist" | "fashion-mnist":
            found = Download((_MNIST if group == "mnist" else _FASHION) + f"{file}.gz", gzip.decompress)
        case "cifar-10":
            found = Download(_CIFAR, lambda sent: _from_tar(sent, file))
        case "adult":
            found = Download(_ADULT, lambda sent: _from_zip(sent, file))
        case _:
            return None
    return found if not base else Download(f"{base.rstrip('/')}/{found.address.rsplit('/', 1)[1]}", found.unpack)


def fetch(name: str, md5: str, to: Path) -> bytes:
    """Download the file `name` into `to` and return its contents.

    Raises:
        InvalidArgument: no network, no such file, or not the published one; says what to put where.
    """
    published = source(name)
    if published is None:
        raise InvalidArgument(f"{to} is missing: want the published file there; TERRINE_DATA names another folder")
    try:
        content = published.unpack(_sent(published.address))
    except (OSError, EOFError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidArgument(
            f"{to} is missing and {published.address} could not be read ({reason}): put the published file there, "
            "plain or as .gz; TERRINE_DATA names another folder"
        ) from None
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise InvalidArgument(f"{published.address} sent {name} with MD5 {found}: want {md5}; nothing was kept")
    _keep(content, to)
    return content


_LAST: dict[str, bytes] = {}
"""The last archive that was sent: several files come in one."""


def _sent(address: str) -> bytes:
    if address in _LAST:
        return _LAST[address]
    with urllib.request.urlopen(address, timeout=60) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        parts, got = [], 0
        with _bar(address, total) as show:
            while part := answer.read(_CHUNK):
                parts.append(part)
                got += len(part)
                show(got)
    if total and got != total:
        raise urllib.error.URLError(f"{got} of {total} bytes arrived")
    content = b"".join(parts)
    _LAST.clear()
    if address.endswith((".tar.gz", ".zip")):
        _LAST[address] = content
    return content


@contextlib.contextmanager
def _bar(address: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where somebody is watching."""
    if not sys.stderr.isatty():
        yield lambda _got: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(address.rsplit("/", 1)[1], total=total or None)
        yield lambda got: progress.update(task, completed=got)


def _from_tar(sent: bytes, file: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(sent), mode="r:gz") as archive:
        for member in archive:
            if member.isfile() and member.name.rsplit("/", 1)[-1] == file:
                held = archive.extractfile(member)
                assert held is not None
                return held.read()
    raise KeyError(f"no {file} in the archive")


def _from_zip(sent: bytes, file: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(sent)) as archive:
        return archive.read(file)


def _keep(content: bytes, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
