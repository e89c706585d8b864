"""Every store is found here: SQLite always, PostgreSQL where a server of one's own can be started."""

from __future__ import annotations

import pytest
from tests.benchmarks import load

from terrine.ledger.store import KINDS


@pytest.fixture(scope="session")
def bench():
    return load("ledger")


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    """One of every kind of store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("postgresql")
