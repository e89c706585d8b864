"""What the DP-SGD tests share: small data, small models, and the slow obvious clipped sum."""

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


def oracle(model, criterion, x, y, clip):
    """The sum of clipped gradients, one example after the other."""
    total = {name: torch.zeros_like(one) for name, one in model.named_parameters() if one.requires_grad}
    for index in range(len(x)):
        loss = criterion(model(x[index : index + 1]), y[index : index + 1]).sum()
        gradients = torch.autograd.grad(loss, [dict(model.named_parameters())[name] for name in total])
        norm = torch.sqrt(sum((one**2).sum() for one in gradients))
        factor = min(1.0, clip / float(norm)) if norm > 0 else 1.0
        for name, gradient in zip(total, gradients, strict=True):
            total[name] += factor * gradient
    return total
