"""The example of several processes runs by torchrun, as replicas and as shards, as one process does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "examples" / "scaling" / "train.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments, processes):
    done = subprocess.run(
        [sys.executable, *(TORCHRUN if processes == 2 else []), SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(printed):
    return float(re.search(r"([\d.]+)% of held-out", printed)[1])


@pytest.mark.parametrize("more", [[], ["--sharded"]], ids=["replicas", "shards"])
def test_two_processes_do_what_one_does(tmp_path, more):
    options = ["--seed", 1, "--epochs", 2]
    alone = run(*options, processes=1)
    printed = run(*options, *more, "--checkpoint", tmp_path / "run.pt", processes=2)
    assert printed.startswith("20 of 20 steps to take")
    assert accuracy(printed) == pytest.approx(accuracy(alone), abs=1.0)
    again = run(*options, "--checkpoint", tmp_path / "run.pt", processes=1)  # as many or as few processes as there are
    assert again.startswith("0 of 20 steps to take")
    assert accuracy(again) == accuracy(printed)
