"""A model that was trained before is tried as any other: another loss, another run, and every check again."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument

PLAN = sgd.Plan(examples=40, lot=10, steps=4, clip=1.0, noise=1.0, delta=1e-3)
DATA = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


class Account:
    """Counts what it was charged."""

    name, charges = "account", 0

    def charge(self, event, purpose, by):
        self.charges += 1


@pytest.fixture
def trained():
    model = nn.Linear(3, 2)
    for _ in range(5):
        sgd.clipped_sum(model, nn.CrossEntropyLoss(), DATA, clip=1.0)
    return model


def without_model(model, batch):
    return batch[0].sum()


def drawing(model, batch, generator=torch.Generator().manual_seed(0)):  # noqa: B008
    x, y = batch
    return functional.cross_entropy(model(x + torch.rand(x.shape, generator=generator)), y)


@pytest.mark.parametrize(
    ("loss", "reason"), [(without_model, "uses no trained parameter"), (drawing, "changed while examples ran")]
)
def test_another_loss_of_a_trained_model_is_tried(trained, loss, reason):
    account, optimizer = Account(), torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match=reason):
        sgd.private_steps(trained, optimizer, DATA, PLAN, loss=loss, account=account)
    assert not account.charges
    with pytest.raises(InvalidArgument, match=reason):
        sgd.clipped_sum(trained, loss, DATA, clip=1.0)
