"""accelerate's prepare is the plain loop, in either order and in bfloat16; two processes are equal to one."""

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
    """The parameters after a run whose loop calls private_steps and accelerator.prepare itself, or the first alone."""
    model = distributed_run.network()
    optimizer, accelerator = torch.optim.SGD(model.parameters(), lr=0.1), Accelerator(cpu=True)
    data, plan = distributed_run.data(), distributed_run.plan()
    if order == "prepare first":
        model, optimizer = accelerator.prepare(model, optimizer)
    steps = sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss())
    if order == "steps first":
        model, optimizer = accelerator.prepare(model, optimizer)
    for _ in steps:
        optimizer.step()
    return list(model.parameters())


def test_a_prepared_run_is_the_ordinary_one():
    found, charges = distributed_run.accelerated()
    assert charges == 1
    orders = [by_hand(order) for order in ("steps first", "prepare first", "no accelerator")]
    for one, *others in zip(found, *orders, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_bfloat16_is_for_the_loss_alone():
    seen, accelerator, model = set(), Accelerator(cpu=True, mixed_precision="bf16"), distributed_run.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        seen.add((torch.is_autocast_enabled("cpu"), model[0](batch[0]).dtype))
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    data, plan = distributed_run.data(), distributed_run.plan()
    model, optimizer, steps = prepare(accelerator, model, optimizer, data, plan, loss=loss, reads_values=True)
    for step in steps:
        assert {one.dtype for one in step.gradients} == {torch.float32}
        optimizer.step()
    assert seen == {(True, torch.bfloat16)}
    for one, other in zip(model.parameters(), by_hand("no accelerator"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16': its losses are scaled"),
        ({"dynamo_backend": "eager"}, "dynamo_backend=EAGER"),
    ],
)
def test_accelerators_that_the_plan_does_not_allow_are_refused_by_name(given, named):
    model = distributed_run.network()
    optimizer, account = torch.optim.SGD(model.parameters(), lr=0.1), distributed_run.Notes()
    accelerator = Accelerator(cpu="mixed_precision" not in given, **{n: v for n, v in given.items() if v != "fp16"})
    if given.get("mixed_precision") == "fp16":  # which accelerate refuses itself where there is no GPU
        accelerator.state._mixed_precision = "fp16"
    data, plan = distributed_run.data(), distributed_run.plan()
    with pytest.raises(InvalidArgument, match=named):
        prepare(accelerator, model, optimizer, data, plan, loss=nn.CrossEntropyLoss(), account=account)
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
