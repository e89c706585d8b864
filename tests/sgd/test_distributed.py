"""Two processes train as one: same lots, each its share, sums added up, the noise there once."""

import runpy
from pathlib import Path

import torch

from . import distributed_run
from .processes import PROCESSES


def test_two_processes_make_the_steps_of_one(tmp_path):
    alone = distributed_run.train(distributed_run.network(), lambda model: model, distributed_run.Notes())
    both = [
        PROCESSES.Process(
            target=runpy.run_path,
            args=(str(Path(distributed_run.__file__)),),
            kwargs={"init_globals": {"RANK": rank, "FOLDER": str(tmp_path)}, "run_name": "__main__"},
        )
        for rank in (0, 1)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    (first, charged), (second, not_charged) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert (charged, not_charged) == (1, 0)
    for one, left, right in zip(alone, first, second, strict=True):
        for expected, a, b in zip(one, left, right, strict=True):
            assert torch.equal(a, b)
            assert torch.allclose(expected, a, atol=2e-3 / 6)  # a grid step of the noisy sum, over the lot
