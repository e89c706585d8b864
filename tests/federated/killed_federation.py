"""Federations that are killed at random calls and gone on with; prints what each opened and paid, a line of JSON each.

    python killed_federation.py FOLDER KIND KILLS

Every attempt is a process of its own, forked after the imports, and killed by SIGKILL at a random call, or return, of
the modules around a release. What is opened and charged is written to a log as it happens, whoever is killed when.
"""

import functools
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from terrine import federated, sgd
from terrine.events import Neighbours
from terrine.federated import learning

ROUNDS = 6
NEAR = ("federated/learning.py", "federated/adding.py", "sgd/checkpoint.py", "sgd/correlated.py", "common/keys.py",
        "common/release_count.py", "terrine/files.py")  # fmt: skip


class Account:
    """Notes its charges, as a ledger would."""

    name = "clients"

    def __init__(self, log):
        self.log = log

    def charge(self, event, *, purpose, by):
        note(self.log, "charged")


def note(log, *words):
    line = json.dumps(words).encode() + b"\n"
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line)
    os.close(file)


@functools.cache
def plan(kind):
    asked = {"clients": 12, "per_round": 3, "rounds": ROUNDS, "clip": 1.0, "noise": 1.0, "delta": 1e-2}
    match kind:
        case "by round":
            return federated.Plan(**asked, sums=federated.Skellam(survivors=2))
        case "adaptive":
            return federated.Plan(**asked | {"clip": federated.AdaptiveClipping(initial=0.1)})
        case "cyclic":
            return federated.Plan(**asked, correlated=sgd.Banded(3))
        case "in order":
            order = sgd.FixedOrder(Neighbours.ZERO_OUT)
            return federated.Plan(**asked, sampling=order, correlated=sgd.Banded(3, momentum=0.5))
        case _:
            return federated.Plan(**asked, sampling=federated.MinimumSeparation(3), correlated=sgd.Banded(3))


def federation(kind, path=None, account=None):
    torch.manual_seed(0)
    rows = [(torch.randn(6, 3), torch.arange(6) % 2) for _ in range(12)]
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    local = federated.Local(lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9), batch=3)
    return federated.Federation(
        model, plan(kind), rows, local=local, server=federated.FedAvg(momentum=0.5), account=account, full=False,
        by_round=kind == "by round", checkpoint=path,
    )  # fmt: skip


def watch(found, log):
    """Note every sum that is opened: its round, its noise (or all of it), and who took part."""
    opening = found._sum

    def noting(number, drawn, updates, gone, rng):
        exact = learning.exact_sum(found.plan, updates, found._dimension)
        opened = opening(number, drawn, updates, gone, rng)
        noise = opened.value if found.plan.by_round else opened.value - exact
        note(log, "opened", number, hashlib.sha256(noise.round(9).tobytes()).hexdigest(), list(drawn.contributing))
        return opened

    found._sum = noting


def attempt(kind, path, kill_at):
    """Go on with the run at `path`, and die at the call of that number; return how many there were."""
    calls, log = 0, path.with_suffix(".log")

    def count_calls(frame, _event, _argument):
        nonlocal calls
        if frame.f_code.co_filename.endswith(NEAR):
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count_calls)
    try:
        found = federation(kind, path, Account(log))
        watch(found, log)
        history = found.fit()
    finally:
        sys.setprofile(None)
    return {"calls": calls, "history": vars(history)}


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
    folder, kind, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    federation(kind).round()  # so that no process imports and prices it again
    calls = forked(lambda: attempt(kind, folder / "whole", None))["calls"]
    chance, run = random.Random(kind), 0
    while kills:
        path, killed, done = folder / f"run {run}", 0, None
        while done is None:
            kill_at = chance.randint(1, calls) if kills else None
            done = forked(lambda p=path, k=kill_at: attempt(kind, p, k))
            killed, kills = killed + (done is None), kills - (done is None)
        log = [json.loads(line) for line in path.with_suffix(".log").read_text().splitlines()]
        print(json.dumps({"killed": killed, "log": log, "history": done["history"]}), flush=True)
        run += 1


if __name__ == "__main__":
    main()
