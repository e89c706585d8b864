"""A run that logs what it releases until somebody kills it: run by the checkpoint tests in a process of its own.

Its loss has no gradient, so what is released is noise alone: two releases with one noise would be equal.
"""

import hashlib
import os

import torch
from torch import nn

from terrine import sgd
from terrine.sgd.checkpoint import Checkpoint

path, log, bill, bands, steps, every = PATH, LOG, BILL, BANDS, STEPS, EVERY  # noqa: F821  set by who runs this file


class Bill:
    name = "bill"

    def charge(self, event, *, purpose, by):
        note(bill, "charged")


def note(file, line):
    """One write at the end of the file: a line is there whole, or not at all."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


torch.set_num_threads(1)
model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
plan = sgd.Plan(examples=40, lot=10, steps=steps, clip=1.0, noise=1.0, delta=1e-5, correlated=sgd.Banded(bands))
data = torch.randn(40, 4), torch.zeros(40, dtype=torch.int64)
run = sgd.private_steps(
    model, optimizer, data, plan, loss=lambda model, batch: 0.0 * model(batch[0]).sum(), account=Bill(),
    checkpoint=Checkpoint(path, every=every),
)  # fmt: skip
for step in run:
    released = torch.cat([gradient.flatten() for gradient in step.gradients]).numpy().tobytes()
    note(log, f"{step.number} {hashlib.sha256(released).hexdigest()}")
    optimizer.step()
