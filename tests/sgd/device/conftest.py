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
    if reason := pretend.start():
        pytest.skip(reason)
    return pretend.NAME


@pytest.fixture
def there(started):
    """The pretend device. Backward passes run in the calling thread; modules that move to it keep their parameters."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # torch does it by itself for cuda and mps
    with torch.autograd.set_multithreading_enabled(False):
        yield torch.device(started)
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.fixture(params=[*FOUND, pretend.NAME])
def device(request):
    """Each device in turn."""
    return request.getfixturevalue("there") if request.param == pretend.NAME else torch.device(request.param)
