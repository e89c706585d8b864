"""Settings for all tests: which are slow, and the same examples in every run.

`make test` runs all but the slow ones, `make test-all` everything. Slow are those marked so, or in slow.txt.
Where a run must be repeatable (CI is set), hypothesis draws the same examples each time.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("repeatable")

SLOW = [
    line for line in (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"
]


def is_slow(nodeid: str) -> bool:
    """Whether a line of slow.txt is the test, its name without parameters, or its file."""
    name, file = nodeid.partition("[")[0], nodeid.partition("::")[0]
    return nodeid in SLOW or name in SLOW or file in SLOW


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
