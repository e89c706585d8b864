"""What the DP-SGD tests share: small data and small models."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # the clipping tests import their oracle by name


@pytest.fixture(autouse=True)
def one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def digits():
    """The scikit-learn digits: 1,500 to train, 297 to test, scaled to 0 ... 1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


@pytest.fixture
def small():
    """Twelve examples of four features in three classes, with gradients that need clipping."""
    generator = torch.Generator().manual_seed(3)
    x = 4 * torch.randn(12, 4, generator=generator)
    y = torch.randint(0, 3, (12,), generator=generator)
    return x, y


@pytest.fixture
def linear():
    generator = torch.Generator().manual_seed(5)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=generator))
        model.bias.zero_()
    return model
