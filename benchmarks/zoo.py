"""What a private gradient costs on about 35 model families, and whether it is exact.

    python benchmarks/zoo.py                       all of them, as a table in markdown
    python benchmarks/zoo.py lstm gru vit          some
    python benchmarks/zoo.py --json zoo.json       the figures as JSON as well
    python benchmarks/zoo.py --seconds 1           less time for each

    exact     the largest deviation of the clipped sums and norms from one example after the other by autograd, in
              float64, relative to the largest entry
    time      of `clipped_sum` to a plain forward and backward pass, turn by turn in one process on one thread: the
              ratio of medians of processor time
    memory    of the first steps, peak above the size before them, each in a process of its own
    hooks, ghost, ew    the time of Opacus' three modes to the plain pass; "-" where it is absent or fails

Models with batch normalisation are those that `sgd.fix` makes of them, for everybody.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from terrine import sgd
from zoo_models import FAMILIES, Batch, Family, losses, make_model

Step = Callable[[], Any]
Loss = Callable[[nn.Module, Batch], Tensor]
CLIP = 1.0
OPACUS = ("hooks", "ghost", "ew")


def private_sums(model: nn.Module, loss: Loss, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """The clipped sums by parameter name and the norms: the one place that knows `clipped_sum`'s arguments."""
    clipped = sgd.clipped_sum(model, loss, batch, clip=CLIP)
    return clipped.sums, clipped.norms


# -- the steps that are compared -------------------------------------------------------------------------


def loss_of(family: Family) -> Loss:
    return lambda model, batch: losses(family.forward(model, batch), batch["labels"]).mean()


def plain(family: Family, model: nn.Module, batch: Batch) -> Step:
    loss = loss_of(family)

    def step() -> None:
        model.zero_grad()
        loss(model, batch).backward()

    return step


def private(family: Family, model: nn.Module, batch: Batch) -> Step:
    loss = loss_of(family)
    return lambda: private_sums(model, loss, batch)


def hooks(family: Family, model: nn.Module, batch: Batch) -> Step:
    from opacus.grad_sample import GradSampleModule

    return _sampled(family, GradSampleModule(model), batch)


def ew(family: Family, model: nn.Module, batch: Batch) -> Step:
    from opacus.grad_sample import GradSampleModuleExpandedWeights

    return _sampled(family, GradSampleModuleExpandedWeights(model), batch)


def _sampled(family: Family, model: Any, batch: Batch) -> Step:
    """Per-example gradients in `.grad_sample`, clipped and summed as Opacus' optimizer does."""

    def step() -> None:
        model.zero_grad()
        losses(family.forward(model, batch), batch["labels"]).mean().backward()
        trained = [one for one in model.parameters() if one.requires_grad and one.grad_sample is not None]
        norms = torch.stack([one.grad_sample.flatten(1).norm(dim=1) for one in trained], 1).norm(dim=1)
        factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for one in trained:
            one.summed_grad = torch.einsum("i,i...", factor, one.grad_sample)
            one.grad_sample = None

    step()
    assert all(hasattr(one, "summed_grad") for one in model.parameters() if one.requires_grad)
    return step


def ghost(family: Family, model: nn.Module, batch: Batch) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)

    def step() -> None:
        wrapped.zero_grad()
        each = losses(family.forward(wrapped, batch), batch["labels"])
        each.mean().backward(retain_graph=True)
        wrapped.zero_grad()
        factor = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factor * each).sum().backward()
        wrapped.enable_hooks()

    return step


STEPS = {step.__name__: step for step in (plain, private, hooks, ghost, ew)}


# -- what is measured ------------------------------------------------------------------------------------


def compare(family: Family) -> float:
    """The largest relative deviation from one example after the other, in float64."""
    model: Any = fixed(make_model(family)).double()
    if hasattr(getattr(model, "config", None), "num_local_experts"):
        model.set_experts_implementation("batched_mm")  # as grouped_mm has no float64
    batch = {name: (one.double() if one.is_floating_point() else one)[:4] for name, one in family.batch().items()}
    loss = loss_of(family)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    wanted = {name: torch.zeros_like(one) for name, one in trained.items()}
    norms = []
    for index in range(len(batch["labels"])):
        row = {name: one[index : index + 1] for name, one in batch.items()}
        gradients = torch.autograd.grad(loss(model, row), list(trained.values()), allow_unused=True)
        norm = torch.stack([one.square().sum() for one in gradients if one is not None]).sum().sqrt()
        norms.append(norm)
        for name, one in zip(trained, gradients, strict=True):
            if one is not None:
                wanted[name] += one * (CLIP / norm).clamp(max=1.0)
    sums, found = private_sums(model, loss, batch)
    largest = max(float(one.abs().max()) for one in wanted.values())
    deviation = max(float((sums[name] - one).abs().max()) for name, one in wanted.items()) / largest
    return max(deviation, float(((found - torch.stack(norms)) / torch.stack(norms)).abs().max()))


def time_steps(family: Family, seconds: float, wanted: list[str]) -> dict[str, float]:
    """Processor seconds of each step, the median over turns that they take one after the other."""
    model, batch = fixed(make_model(family)), family.batch()
    steps, times = {}, {}
    for name in wanted:
        try:
            steps[name] = STEPS[name](family, copy.deepcopy(model), batch)
            steps[name]()
            times[name] = []
        except Exception as failure:
            if name not in OPACUS:
                raise
            steps.pop(name, None)
            print(f"{name}: {str(failure).splitlines()[0] if str(failure) else failure!r}"[:150], file=sys.stderr)
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or rounds < 3:
        for name, step in steps.items():
            if name in OPACUS and rounds >= 2:  # which may take a hundred times as long
                continue
            before = time.process_time()
            step()
            times[name].append(time.process_time() - before)
        rounds += 1
    return {name: statistics.median(each) for name, each in times.items()}


def measure_memory(family: Family, name: str) -> float:
    """Peak bytes of the first steps above those before."""
    step = STEPS[name](family, fixed(make_model(family)), family.batch())
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    for _ in range(3):
        step()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def fixed(model: nn.Module) -> nn.Module:
    return sgd.fix(model) if any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules()) else model


# -- one family, each figure in a process of its own -----------------------------------------------------


def measure(name: str, seconds: float, peers: bool) -> dict[str, Any]:
    """A family's row."""
    family, row = FAMILIES[name], {"family": name, "about": FAMILIES[name].about}
    row["exact"] = in_process(compare, family)
    row["seconds"] = in_process(time_steps, family, seconds, ["plain", "private", *(OPACUS if peers else ())])
    row["bytes"] = {step: in_process(measure_memory, family, step) for step in ("plain", "private")}
    return row


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a fresh process; a string where it fails."""
    receiver, sender = multiprocessing.Pipe(False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return "died"
    finally:
        process.join()


def _send(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("terrine.sgd").addFilter(lambda record: "fix:" not in record.getMessage())
    try:
        sender.send(function(*args))
    except Exception as failure:
        sender.send(f"{type(failure).__name__}: {failure}"[:300])


def as_cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    exact, seconds, peak = row["exact"], row["seconds"], row["bytes"]
    cells = [row["family"], f"{exact:.0e}" if isinstance(exact, float) else "fails"]
    if isinstance(seconds, str):
        return [*cells, *["-"] * 6]
    cells += [f"{seconds['plain'] * 1e3:.1f} ms", f"{seconds['private'] / seconds['plain']:.2f}"]
    whole = not any(isinstance(one, str) for one in peak.values())
    cells.append(f"{peak['private'] / max(peak['plain'], 1.0):.2f}" if whole else "-")
    return cells + [f"{seconds[name] / seconds['plain']:.1f}" if name in seconds else "-" for name in OPACUS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--seconds", type=float, default=3.0, help="for the steps of a family; three turns at least")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--no-peers", action="store_true", help="without Opacus")
    options = parser.parse_args()
    unknown = set(options.names) - FAMILIES.keys()
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; want some of {', '.join(FAMILIES)}")
    heads = ["family", "exact", "plain", "time", "memory", *OPACUS]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    rows = []
    for name in options.names or FAMILIES:
        row = measure(name, options.seconds, not options.no_peers)
        rows.append(row)
        print("| " + " | ".join(as_cells(row)) + " |", flush=True)
        for failure in (row["exact"], row["seconds"], *(row["bytes"] if isinstance(row["bytes"], list) else ())):
            if isinstance(failure, str):
                print(f"{name}: {failure}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
