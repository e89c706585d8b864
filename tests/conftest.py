"""Settings for all tests: which are slow, a PostgreSQL server of their own, and the same examples in every run.

`make test` runs all but the slow ones, `make test-all` everything. Slow are those marked so, or in slow.txt.
Where a run must be repeatable (CI is set), hypothesis draws the same examples each time.
"""

import os
import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.benchmarks import load

settings.register_profile("repeatable", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("repeatable")

Report = pytest.CollectReport
TESTS = Path(__file__).parent
SLOW = {line for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"}


def meant_by(nodeid: str) -> tuple[str, str, str]:
    """The lines of slow.txt that would mean this test: itself, its name without parameters, and its file."""
    return nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]


def pytest_configure() -> None:
    gone = sorted(line for line in SLOW if not (TESTS.parent / line.partition("::")[0]).is_file())
    if gone:
        raise pytest.UsageError(f"tests/slow.txt: no such file: {', '.join(gone)}; want where it is now, or no line")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Report, Report]:
    """A line of slow.txt that means no test of its file is an error: whatever is chosen, a file is collected whole."""
    report = yield
    if isinstance(collector, pytest.Module) and report.passed and report.result:
        meant = {line for item in report.result for line in meant_by(item.nodeid)}
        idle = sorted(line for line in SLOW - meant if line.partition("::")[0] == collector.nodeid)
        if idle:
            report.outcome = "failed"
            report.longrepr = f"tests/slow.txt: no such test: {', '.join(idle)}; want the name it has now, or no line"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not SLOW.isdisjoint(meant_by(item.nodeid)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a server that is gone after the tests; every process of pytest-xdist has its own."""
    postgres = load("postgres")
    if reason := postgres.reason_to_skip():
        pytest.skip(reason)
    pytest.importorskip("psycopg")
    with postgres.server(durable=False) as url:
        yield url


@pytest.fixture(scope="session")
def new_schema(postgresql_server: str) -> Callable[[], str]:
    """Makes fresh schemas on the server, and gives their URLs."""
    return lambda: str(load("postgres").schema(postgresql_server, f"test_{secrets.token_hex(6)}"))


@pytest.fixture
def postgresql(new_schema: Callable[[], str]) -> str:
    """The URL of a fresh schema."""
    return new_schema()
