"""accelerate's prepare in the order that works, the other refused; two processes equal to one; sharding refused."""

import multiprocessing
import runpy
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.errors import InvalidArgument

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from terrine.integrations.accelerate import prepare

from . import distributed_run

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "terrine.sgd"])


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate keeps its state for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def by_hand(order):
    """The parameters after a run whose loop calls make_private and accelerator.prepare itself."""
    model = distributed_run.network()
    optimizer, accelerator = torch.optim.SGD(model.parameters(), lr=0.1), Accelerator(cpu=True)
    data, plan = distributed_run.data(), distributed_run.plan()
    if order == "prepare first":
        model, optimizer = accelerator.prepare(model, optimizer)
    model, optimizer, lots = sgd.make_private(model, optimizer, data, plan)
    model, optimizer, lots = accelerator.prepare(model, optimizer, lots)
    for x, y in lots:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    return list(model.parameters())


def plain():
    model = distributed_run.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, lots = sgd.make_private(model, optimizer, distributed_run.data(), distributed_run.plan())
    for x, y in lots:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return list(model.parameters())


def test_a_prepared_run_is_the_ordinary_one():
    found, charges = distributed_run.accelerated()
    assert charges == 1
    for one, two, three in zip(found, by_hand("make_private first"), plain(), strict=True):
        assert torch.equal(one, three)
        assert torch.equal(two, three)


def test_an_optimizer_that_accelerate_has_wrapped_is_refused():
    with pytest.raises(InvalidArgument, match="AcceleratedOptimizer around another: want make_private with the one"):
        by_hand("prepare first")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16'"),
        ({"dynamo_backend": "eager"}, "dynamo_backend=EAGER"),
    ],
)
def test_accelerators_that_the_plan_does_not_allow_are_refused_by_name(given, named):
    model = distributed_run.network()
    optimizer, account = torch.optim.SGD(model.parameters(), lr=0.1), distributed_run.Notes()
    with pytest.raises(InvalidArgument, match=named):
        prepare(
            Accelerator(cpu=True, **given), model, optimizer, distributed_run.data(), distributed_run.plan(), account
        )
    assert account.charges == 0


def together(kind, folder):
    """Two processes, to their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [
        PROCESSES.Process(
            target=runpy.run_path,
            args=(str(Path(distributed_run.__file__)),),
            kwargs={
                "init_globals": {"KIND": kind, "RANK": rank, "FOLDER": str(folder), "PORT": port},
                "run_name": "__main__",
            },
        )
        for rank in (0, 1)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accelerate", "huggingface"])
def test_two_processes_make_the_steps_of_one(kind, tmp_path):
    if kind == "huggingface":
        pytest.importorskip("transformers")
        alone, _ = distributed_run.transformed(tmp_path)
    else:
        alone, _ = distributed_run.accelerated()
    (first, charged), (second, not_charged) = together(kind, tmp_path)
    assert (charged, not_charged) == (1, 0)
    for expected, a, b in zip(alone, first, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(expected, a, rtol=0, atol=1e-3)  # grid steps of the noisy sums


@pytest.mark.slow
def test_a_model_of_fully_shard_is_refused_in_both_processes(tmp_path):
    for said, charges in together("fsdp", tmp_path):
        assert "is sharded (FSDP): no process has an example's whole gradient" in said
        assert charges == 0
