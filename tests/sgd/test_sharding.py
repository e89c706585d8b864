"""Models that are sharded by FSDP2 over two processes: the steps, the model and the checkpoint of one process."""

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.sgd.optimizers import Average

from . import sharded_run
from .distributed_run import data, plan
from .processes import PROCESSES
from .sharded_run import network, submodules, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    processes = [PROCESSES.Process(target=sharded_run.process, args=(rank, str(folder))) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """What both processes found in every scenario."""
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


PLANS = {
    "plain": {},
    "people": {"name": "people"},
    "correlated": {"name": "correlated"},
    "adaptive": {"name": "adaptive"},
}
PLANS |= {
    "small lots": {"name": "small lots"},
    "as a whole": {},
    "hybrid": {},
    "submodules": {"loss": submodules},
    "again": {},
}


@pytest.mark.parametrize("name", PLANS)
def test_two_processes_make_the_steps_of_one(results, name):
    gradients, model, numbers, charges = train(0, network(), **PLANS[name])
    for rank, found in enumerate(results):
        assert not isinstance(found[name], str), found[name]
        sharded, same_model, part, charged = found[name]
        assert charged == (charges if rank == 0 else 0)
        for (norm, expected), (sharded_norm, whole) in zip(gradients, sharded, strict=True):
            assert sharded_norm == (pytest.approx(norm, rel=1e-2) if rank == 0 else 0.0)
            assert all(torch.allclose(*pair, atol=2e-3) for pair in zip(expected, whole, strict=True))
        assert all(torch.allclose(value, same_model[key], atol=5e-2) for key, value in model.items())
        assert part == (numbers if name == "hybrid" else pytest.approx(numbers / 2, rel=0.3))


def test_a_sharded_run_goes_on_where_it_was(results):
    for found in results:
        numbers, ((before, moments), (after, moments_after)) = found["go on"]
        assert numbers == [0, 3]
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(torch.equal(*pair) for pair in zip(moments, moments_after, strict=True))


def test_its_checkpoint_is_that_of_one_process(folder, results):
    """Whole tensors: it goes on with another number of processes, or with nothing sharded."""
    model = network()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    steps = sgd.private_steps(
        model, optimizer, data(), plan(seed=None), loss=nn.CrossEntropyLoss(), checkpoint=folder / "run.pt"
    )
    assert steps.number == 3
    saved, _ = results[0]["go on"][1][0]
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    numbers = []
    for step in steps:
        optimizer.step()
        numbers.append(step.number)
    assert numbers == [4, 5, 6]


def test_a_model_works_by_itself_before_and_after_a_run(results):
    for found in results:
        (before, after), wrapped, are_parts = found["use afterwards"]
        assert are_parts
        assert len(wrapped) == 3
        assert all(torch.allclose(*pair) for pair in zip(before, after, strict=True))


def test_where_one_fails_all_end_at_once(results):
    (first, _), (second, number) = (found["a failing loss"] for found in results)
    assert (first[0], second[0], number) == ("OutOfOrder", "MemoryError", 2)


def test_a_trainer_validates_and_averages_as_one_process_does(results):
    model = network()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    options = {"validation": sgd.PublicValidation(data(), every=3), "average": Average(0.5), "progress": False}
    trainer = sgd.Trainer(model, optimizer, nn.CrossEntropyLoss(), plan(), **options)
    scores, loss = trainer.fit(data()).scores, trainer.evaluate(data()).loss
    for found in results:
        (sharded_scores, sharded_loss), (kind, said, _) = found["fit"]
        assert (sharded_scores, sharded_loss) == (scores, pytest.approx(loss, rel=1e-2))
        assert (kind, "not for a sharded model" in said) == ("InvalidArgument", True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixed precision", "precision='bf16'"),
        ("tensor parallel", "no tensor parallelism"),
        ("an average", "keep() for what is whole"),
        ("clipped_sum", "give it to private_steps"),
    ],
)
def test_what_is_not_done_is_refused_in_words(results, name, said):
    for found in results:
        assert found[name][0] in ("InvalidArgument", "OutOfOrder")
        assert said in found[name][1]
