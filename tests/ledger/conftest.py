"""Every store is found here: SQLite always, PostgreSQL where a server of one's own can be started."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from pathlib import Path

import pytest

from terrine.ledger.store import KINDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    """A benchmark as a module: the tests run the same code, at a smaller size."""
    if (known := sys.modules.get(f"benchmarks_{name}")) is not None:
        return known
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"benchmarks_{name}"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bench():
    return load("ledger")


@pytest.fixture(scope="session")
def postgresql_server():
    postgres = load("postgres")
    if reason := postgres.reason_to_skip():
        pytest.skip(reason)
    pytest.importorskip("psycopg")
    with postgres.server(durable=False) as url:
        yield url


@pytest.fixture
def postgresql(postgresql_server):
    """A fresh schema on the server."""
    return load("postgres").schema(postgresql_server, f"test_{secrets.token_hex(6)}")


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    """One of every kind of store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("postgresql")
