"""Finding a data set's files and checking that they are the published ones (MD5, as their publishers state it)."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

from terrine.datasets.download import fetch
from terrine.errors import InvalidArgument


def folder() -> Path:
    """Where data sets are looked for."""
    named = os.environ.get("TERRINE_DATA")
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "terrine"


def read(name: str, md5: str) -> bytes:
    """The contents of `name` in the data folder, plain or as `name`.gz, if its sum is `md5`; fetched where absent.

    Raises:
        InvalidArgument: the file is missing and cannot be fetched, or is not the published one.
    """
    plain = folder() / name
    packed = plain.with_name(plain.name + ".gz")
    if plain.is_file():
        content = plain.read_bytes()
    elif packed.is_file():
        content = gzip.decompress(packed.read_bytes())
    else:
        return fetch(name, md5, plain)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise InvalidArgument(f"{plain} has MD5 {found}: want {md5}, the published file")
    return content
