"""Feature tests run on one thread, from one seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)
