"""A run that kills itself at a given moment: run by the checkpoint tests in a process of its own."""

import os
import signal

import torch
from torch import nn

from terrine import sgd
from terrine.sgd.checkpoint import Checkpoint

path, killed_at, moment, bill = PATH, KILLED_AT, MOMENT, BILL  # noqa: F821  set by who runs this file


class Bill:
    name = "bill"

    def charge(self, event, *, purpose, by):
        with open(bill, "a") as file:
            file.write("charged\n")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
clip = sgd.Adaptive(initial=1.0)
plan = sgd.Plan(examples=40, lot=10, steps=12, clip=clip, noise=1.0, delta=1e-5, seed=3)
keep = Checkpoint(path, every=2)
if moment == "write":
    replace = os.replace

    def half(source, target):
        if str(target) == path and step == killed_at:
            die()
        replace(source, target)

    os.replace = half
step = 0
model, optimizer, lots = sgd.make_private(model, optimizer, (x, y), plan, Bill(), checkpoint=keep)
lots.keep(schedule=schedule)
for a, b in lots:
    step = lots.run.step.taken + 1
    nn.CrossEntropyLoss()(model(a), b).backward()
    if moment == "before" and step == killed_at:
        die()
    optimizer.step()
    if moment == "after" and step == killed_at:
        die()
    schedule.step()
torch.save(model.state_dict(), path + ".final")
