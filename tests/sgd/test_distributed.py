"""Two processes train as one: same lots, each its share, sums added up, the noise there once."""

import runpy
from pathlib import Path

import pytest
import torch

from . import distributed_run
from .processes import PROCESSES


def together(folder, stop=None, bands=1):
    """Two processes, to their end."""
    names = {"FOLDER": str(folder), "STOP": stop, "BANDS": bands}
    both = [
        PROCESSES.Process(
            target=runpy.run_path,
            args=(str(Path(distributed_run.__file__)),),
            kwargs={"init_globals": names | {"RANK": rank}, "run_name": "__main__"},
        )
        for rank in (0, 1)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("bands", [1, 2])
def test_two_processes_make_the_steps_of_one(tmp_path, bands):
    """With independent noise and with correlated noise."""
    alone = distributed_run.train(distributed_run.network(), lambda model: model, distributed_run.Notes(), bands)
    (first, charged), (second, not_charged) = together(tmp_path, bands=bands)
    assert (charged, not_charged) == (1, 0)
    for one, left, right in zip(alone, first, second, strict=True):
        for expected, a, b in zip(one, left, right, strict=True):
            assert torch.equal(a, b)
            assert torch.allclose(expected, a, atol=2e-3 / 6)  # a grid step of the noisy sum, over the lot


def test_two_processes_with_dropout_go_on_to_the_same_model(tmp_path):
    """Each draws masks of its own: both must draw them again as they did."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = together(tmp_path / "whole", 99)[0]
    together(tmp_path / "parts", 3)
    for found in together(tmp_path / "parts", 99):
        assert all(torch.equal(found[name], one) for name, one in whole.items())
