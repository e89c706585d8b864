"""Runs federations that are killed at a moment and gone on with; prints what came of each as one line of JSON.

Every run is a process of its own, forked after the imports.
"""

import functools
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from terrine import federated, sgd
from terrine.events import Neighbours
from terrine.federated.checkpoint import FederationCheckpoint

ROUNDS = 5
MOMENTS = ((0, "charged"), (1, "noted"), (2, "opened"), (3, "saved"))


class Account:
    """Counts its charges in a file, as a ledger would."""

    name = "clients"

    def __init__(self, path):
        self.path = path

    def charge(self, event, *, purpose, by):
        with self.path.open("a") as file:
            file.write("charge\n")


@functools.cache
def plan(kind):
    asked = {"clients": 12, "per_round": 4, "rounds": ROUNDS, "clip": 1.0, "noise": 1.0, "delta": 1e-2, "seed": 5}
    match kind:
        case "shares":
            return federated.Plan(**asked, sums=federated.Skellam(survivors=2))
        case "adaptive":
            return federated.Plan(**asked | {"clip": federated.AdaptiveClipping(initial=0.1)})
        case "cyclic":
            return federated.Plan(**asked, correlated=sgd.Banded(3))
        case "fixed":
            order = sgd.FixedOrder(Neighbours.ZERO_OUT)
            return federated.Plan(**asked, sampling=order, correlated=sgd.Banded(3, momentum=0.5))
        case _:
            return federated.Plan(**asked, sampling=federated.MinimumSeparation(3), correlated=sgd.Banded(3))


def federation(kind, path, account=None):
    torch.manual_seed(0)
    rows = [(torch.randn(6, 3), torch.arange(6) % 2) for _ in range(12)]
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    local = federated.Local(lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9), epochs=2, batch=2)
    return federated.Federation(
        model, plan(kind), rows, local=local, server=federated.FedAvg(momentum=0.5), account=account, dropping=0.1,
        full=False, by_round=kind == "shares", checkpoint=path,
    )  # fmt: skip


def killing(found, at, moment):
    """Die in round `at`: when it was charged, its sum noted, its sum opened, or its end saved."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(method):
        def called(*arguments, **named):
            method(*arguments, **named)
            if found._begun == at + (moment != "charged"):
                die()

        return called

    match moment:
        case "charged":
            found._pay = dying(found._pay)
        case "noted":
            FederationCheckpoint.before_release = dying(FederationCheckpoint.before_release)
        case "opened":
            found._step = dying(found._step)
        case _:
            FederationCheckpoint.save = dying(FederationCheckpoint.save)
    found.fit()


def told(found):
    weights = b"".join(one.detach().numpy().tobytes() for one in found.model.parameters())
    return {"weights": hashlib.sha256(weights).hexdigest(), "history": vars(found.history)}


def forked(work):
    """What `work` returns in a process of its own; None where that was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writing, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    assert status == 0
    return json.loads(text)


def main():
    torch.set_num_threads(1)
    federation(sys.argv[2], None).round()  # so that no process imports and prices it again
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    whole = forked(lambda: _whole(kind, folder))
    print(json.dumps({"moment": "never", **whole}), flush=True)
    for at, moment in MOMENTS:
        path, account = folder / moment, Account(folder / f"{moment}.charges")
        killed = forked(lambda p=path, a=account, w=(at, moment): killing(federation(kind, p, a), *w))
        assert killed is None, moment
        found = forked(lambda p=path, a=account: _on(kind, p, a))
        charges = len(account.path.read_text().splitlines())
        secrets = [one for one in (".key", ".steps") if path.with_name(path.name + one).exists()]
        print(json.dumps({"moment": moment, "charges": charges, "secrets": secrets, **found}), flush=True)


def _whole(kind, folder):
    found = federation(kind, folder / "whole")
    found.fit()
    return told(found)


def _on(kind, path, account):
    found = federation(kind, path, account)
    begun = found.history.rounds
    found.fit()
    return told(found) | {"begun": begun}


if __name__ == "__main__":
    main()
