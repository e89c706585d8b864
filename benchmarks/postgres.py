"""A PostgreSQL server of one's own: in a temporary folder, on loopback, gone afterwards.

PostgreSQL refuses to run as root; then it runs as another user of the machine.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def reason_to_skip() -> str | None:
    """Why no server can be started here, or None if one can."""
    if not shutil.which("initdb") or not shutil.which("pg_ctl"):
        return "initdb and pg_ctl are not on the PATH"
    if os.geteuid() == 0 and _other_user() is None:
        return "PostgreSQL refuses to run as root, and there is no other user to run it"
    return None


@contextlib.contextmanager
def server(*, durable: bool = True) -> Iterator[str]:
    """The URL of a fresh database, while the block runs; not `durable` is quicker and for tests of anything else."""
    user = _other_user() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp" if os.path.isdir("/tmp") else None))
    data, port = folder / "data", _free_port()
    if user:
        shutil.chown(folder, user)
    options = f"-h 127.0.0.1 -p {port} -k {folder} -c max_connections=60 -c fsync={'on' if durable else 'off'}"
    try:
        _run(["initdb", "-D", str(data), "-U", "terrine", "-A", "trust", "-E", "UTF8", "--locale=C"], user, folder)
        _run(["pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-w", "-o", options, "start"], user, folder)
        try:
            yield f"postgresql+psycopg://terrine@127.0.0.1:{port}/postgres"
        finally:
            _run(["pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop"], user, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def schema(url: str, name: str) -> str:
    """The URL of a fresh schema called `name` on the server at `url`."""
    import psycopg

    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{name}"')
    return f"{url}?options=-csearch_path%3D{name}"


def _run(command: list[str], user: str | None, folder: Path) -> None:
    done = subprocess.run(
        command, user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip()}")


def _other_user() -> str | None:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
