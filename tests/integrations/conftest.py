"""What the tests of integrations share: one thread, and quiet libraries."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    torch.set_num_threads(1)


class Notes:
    """An account that keeps what it was charged."""

    name = "notes"

    def __init__(self):
        self.charges = []

    def charge(self, event, *, purpose, by):
        self.charges.append(event)


@pytest.fixture
def account():
    return Notes()
