"""What the state that a loss reaches is made of: told apart by name, and without the run's own bookkeeping."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.sgd.clipping.state import Reachable


class Alike:
    def __repr__(self):
        return "alike"


@pytest.mark.parametrize("keys", [(Alike(), Alike()), ("a" * 70 + "1", "a" * 70 + "2")], ids=["objects", "long names"])
def test_entries_whose_keys_look_alike_are_told_apart(keys):
    entries = dict.fromkeys(keys, 0.0)
    reachable = Reachable({"entries": entries})
    assert not reachable.changed()
    entries[keys[0]] = 1.0
    assert reachable.changed().startswith("entries[")


def run(loss, model, optimizer):
    data = torch.randn(24, 4), torch.randint(0, 3, (24,))
    data[1][0] = 7  # whose loss fails: the run takes note of it
    plan = sgd.Plan(examples=24, lot=24, steps=2, clip=0.3, noise=1.0, delta=1e-3, sampling=sgd.FixedSize())
    for _ in sgd.private_steps(model, optimizer, data, plan, loss=loss, account=Account()):
        optimizer.step()


class Account:
    def charge(self, event, *, purpose, by):
        Account.charges += 1

    charges = 0


def test_a_loss_may_name_its_optimizer_and_an_autocast():
    """The optimizer's hooks lead to the run itself, and an autocast notes what was before it."""
    model, autocast = nn.Linear(4, 3), torch.autocast("cpu", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model, batch):
        with autocast:
            out = model(batch[0])
        return functional.cross_entropy(out.float(), batch[1]) * optimizer.param_groups[0]["lr"]

    run(loss, model, optimizer)


def test_a_loss_that_keeps_something_is_refused_before_the_charge():
    model, losses = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        losses.append(functional.cross_entropy(model(batch[0]), batch[1]))
        return losses[-1]

    before = Account.charges
    with pytest.raises(InvalidArgument, match="loss:losses changed while examples ran"):
        run(loss, model, optimizer)
    assert Account.charges == before
