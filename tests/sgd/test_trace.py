"""How much of this library one step passes through: what somebody who knows it by heart has to know."""

import sys
from pathlib import Path

import torch
from torch import nn

import terrine
from terrine import sgd

from .helpers import make_optimizer, make_plan

SOURCE = str(Path(terrine.__file__).parent)
FUNCTIONS, FILES = 160, 28  # may only fall; the goal is 60 functions in 12 files
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")  # parts of the function they stand in


def trace(call):
    """The functions of ours that a call passes through, as (file, name)."""
    seen = set()

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name not in INNER:
            seen.add((Path(code.co_filename).relative_to(SOURCE).as_posix(), code.co_qualname))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_a_step_of_an_mlp_passes_through_few_functions():
    """MLP 784-1000-10 and a lot of 600, as W1 of benchmarks/sgd.py: a step in the midst of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1_000), nn.ReLU(), nn.Linear(1_000, 10))
    data = torch.randn(1_200, 784), torch.randint(10, (1_200,))
    plan = make_plan(examples=1_200, lot=600, clip=1.0, noise=1.0, steps=60, seed=None)
    optimizer = make_optimizer(model)
    steps = sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss())
    for _ in range(5):
        next(steps)
        optimizer.step()
    traced = [trace(lambda: (next(steps), optimizer.step())) for _ in range(4)]
    seen = min(traced, key=len)  # one step in 32 looks at the state of model and loss as well
    files = sorted({file for file, _ in seen})
    listed = "\n".join(f"{file}: {', '.join(sorted(name for at, name in seen if at == file))}" for file in files)
    print(f"{len(seen)} functions in {len(files)} files\n{listed}")
    assert len(seen) <= FUNCTIONS, f"{len(seen)} functions\n{listed}"
    assert len(files) <= FILES, f"{len(files)} files\n{listed}"
