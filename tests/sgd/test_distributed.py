"""Several processes train as one would; where one is given, or does, something else, all of them are refused."""

import pytest
import torch

from . import distributed_run
from .distributed_run import PLANS, SCENARIOS
from .processes import PROCESSES


def run_two(target, *arguments):
    """Both processes' exit codes."""
    processes = [PROCESSES.Process(target=target, args=(rank, *arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both processes found in every scenario."""
    folder = tmp_path_factory.mktemp("together")
    assert run_two(distributed_run.process, str(folder)) == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def are_equal(first, second):
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one[1], other[1], strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", [*(name for name in PLANS if name != "fresh"), "wrapped", "plain again"])
def test_two_processes_make_the_steps_of_one(results, name):
    (first, charged), (second, charged_again) = (found[name] for found in results)
    alone, _ = SCENARIOS[name if name in PLANS else "plain"](0, None)
    assert (charged, charged_again) == (1, 0)
    assert are_equal(first, second)
    assert len(first) == len(alone) == 6
    for expected, found in zip(alone, first, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-2)
        assert found[2] == pytest.approx(expected[2], abs=1e-2)
        assert found[3] == pytest.approx(expected[3])
        for one, other in zip(expected[1], found[1], strict=True):
            assert torch.allclose(one, other, atol=2e-3)  # grid steps of the noisy sum


@pytest.mark.parametrize("name", ["fresh", "dropout"])
def test_replicas_stay_equal(results, name):
    assert are_equal(results[0][name][0], results[1][name][0])


def test_a_run_goes_on_with_what_it_kept_in_every_process(results):
    (first, rate, model), (second, rate_again, model_again) = (found["go on"] for found in results)
    assert first == second == [1, 2, 3, 4, 5, 6]
    assert rate == rate_again == [pytest.approx(0.05 * 0.5**6)]
    assert all(torch.equal(model[name], model_again[name]) for name in model)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("shards", "data set: process 1 has another"),
        ("another model", "model: process 1 has another"),
        ("another plan", "plan: process 1 has another"),
    ],
)
def test_what_differs_is_refused_and_it_is_said_where(results, name, what):
    for found in results:
        kind, said, seconds, *charges = found[name]
        assert (kind, charges in ([], [0])) == ("InvalidArgument", True)
        assert what in said
        assert "\n" not in said
        assert seconds < 10


def test_a_data_set_that_is_too_small_in_one_process_is_refused_in_all(results):
    kinds, said, _ = zip(*(found["a smaller data set"] for found in results), strict=True)
    assert kinds == ("OutOfOrder", "InvalidArgument")
    assert all("dataset of 11 examples" in one for one in said)


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [("no account left", "BudgetExceeded", "left"), ("a second run", "OutOfOrder", "another run")],
)
def test_what_the_first_process_is_refused_all_are(results, name, kind, what):
    for found in results:
        assert found[name][0] == kind
        assert what in found[name][1]


def test_a_process_that_takes_other_steps_is_refused(results):
    """Its replica is another model by now."""
    for found in results:
        (kind, said, _), number = found["a skipped step"]
        assert (kind, number) == ("InvalidArgument", 3)
        assert "number of optimizer steps: process 1" in said


def test_where_one_fails_all_end_at_once(results):
    (first, _), (second, number) = (found["a failing loss"] for found in results)
    assert (first[0], second[0], number) == ("OutOfOrder", "MemoryError", 2)
    assert "process 1: MemoryError: no room" in first[1]
    assert first[2] < 30


def test_where_the_count_cannot_be_written_nobody_releases(results):
    for found in results:
        (kind, said, _), is_untouched = found["a full disk"]
        assert (kind, is_untouched) == ("OutOfOrder", True)
        assert "nothing is released" in said


def test_a_process_that_dies_ends_the_run_within_seconds_and_it_goes_on(tmp_path):
    assert run_two(distributed_run.die, str(tmp_path), "meet", 3) == [0, -9]
    (kind, said, seconds), numbers = torch.load(tmp_path / "0.pt")
    assert kind == "OutOfOrder"
    assert "gone" in said
    assert seconds < 30
    assert numbers == [1, 2, 3]
    assert run_two(distributed_run.die, str(tmp_path), "meet again", 99) == [0, 0]
    for rank in (0, 1):
        (kind, _, _), numbers = torch.load(tmp_path / f"{rank}.pt")
        assert kind == "nothing"
        assert numbers in ([4, 5, 6], [5, 6])
