"""One of several processes that train one model, or the only one: run by the distributed test."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from terrine import sgd
from terrine.sgd.checkpoint import Checkpoint


def plan(bands=1):
    correlated = sgd.Banded(bands)
    return sgd.Plan(examples=12, lot=6, steps=6, clip=0.7, noise=1.0, delta=1e-5, seed=2, correlated=correlated)


def data():
    generator = torch.Generator().manual_seed(3)
    return 4 * torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)


class Notes:
    name = "notes"

    def __init__(self):
        self.charges = 0

    def charge(self, event, *, purpose, by):
        self.charges += 1


def train(model, wrap, account, bands=1):
    torch.set_num_threads(1)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(model, optimizer, data(), plan(bands), account)
    gradients = []
    for x, y in lots:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        gradients.append([one.grad.clone() for one in model.parameters()])
    return gradients


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def process(rank, folder, bands):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    account = Notes()
    gradients = train(network(), DistributedDataParallel, account, bands)
    torch.save((gradients, account.charges), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def kept_process(rank, folder, stop):
    """Train with dropout and a checkpoint, up to a step at which the process is as good as killed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet{stop}", rank=rank, world_size=2)
    model = network()
    model.insert(1, nn.Dropout(0.5))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = Checkpoint(f"{folder}/run.pt", every=2)
    model, optimizer, lots = sgd.make_private(model, optimizer, data(), plan(), checkpoint=keep)
    torch.randn(3 + rank)  # what else a program may draw
    for x, y in lots:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        if lots.run.step.taken == stop:
            break
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if STOP is None:  # noqa: F821  set by who runs this file
        process(RANK, FOLDER, BANDS)  # noqa: F821
    else:
        kept_process(RANK, FOLDER, STOP)  # noqa: F821
