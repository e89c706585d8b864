"""The devices that are here, and the pretend one where it can be built."""

import pytest
import torch

from . import pretend

FOUND = ["cpu"]
if torch.cuda.is_available():
    FOUND.append("cuda")
if torch.backends.mps.is_available():
    FOUND.append("mps")


@pytest.fixture(scope="session")
def started():
    """Builds the pretend device, or skips."""
    if reason := pretend.start():
        pytest.skip(reason)


@pytest.fixture
def there(started):
    """The pretend device."""
    with pretend.used() as device:
        yield device


@pytest.fixture(params=[*FOUND, pytest.param(pretend.NAME, marks=pytest.mark.slow)])
def device(request):
    """Each device in turn."""
    return request.getfixturevalue("there") if request.param == pretend.NAME else torch.device(request.param)


def pytest_collection_modifyitems(items):
    for item in items:
        if "started" in getattr(item, "fixturenames", ()):  # it takes a compiler a minute
            item.add_marker(pytest.mark.slow)
