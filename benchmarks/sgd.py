"""What a private step costs: Terrine against Opacus (hooks and ghost clipping) and the plain, non-private step.

    python benchmarks/sgd.py                       all workloads
    python benchmarks/sgd.py W2 W5 --rounds 50     some of them, more rounds
    python benchmarks/sgd.py epoch                 with the sampler, against the plain loop with a DataLoader
    python benchmarks/sgd.py --json sgd.json       figures as JSON as well
    python benchmarks/models.py                    other models, in the same way

Every candidate runs in a fresh process of its own; the processes take turns of about a tenth of a second, so that
whatever else the machine does falls on all alike. A turn begins with steps that do not count, because the threads of
the process before go on spinning for some milliseconds. A step's time is the mean over a turn, then the median over
rounds; a ratio is to the better of the two plain steps (as is, and with channels_last memory), taken round by round.
"epoch" is a tenth of an epoch, loading and sampling included. Memory is the peak resident size during the first
steps above the size before them, when the code of a smallest step is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], None]

CLIP, NOISE, RATE = 1.0, 1.0, 0.1
TURN = 0.1  # seconds
WARM = 0.02  # seconds of a turn before those that count
LEAST = 20.0  # seconds that rounds go on for: the machine's moods last for some
FIRST = 8  # steps whose memory counts: malloc finds its places in the first few
PLAIN = ("plain", "plain channels_last")


@dataclass(frozen=True)
class Workload:
    """A model, one lot for it, and the ratios to reach, if any."""

    name: str
    about: str
    model: Callable[[], nn.Module]
    lot: Callable[[], tuple[Tensor, Tensor]]
    time: float | None = None
    memory: float = 1.5
    epoch: int = 0  # lots of the data set; 0: the same lot all the time


class Bags(nn.Module):
    """Bag of words: a table of 50,000 words, added up, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50_000, 128, mode="sum")
        self.out = nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens))


class Encoder(nn.Module):
    """A transformer encoder over tokens, mean pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1_000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1_024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.words(tokens)).mean(1))


class Block(nn.Module):
    """A residual block with group normalisation."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, width)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.short = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.GroupNorm(32, width))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.short(x))


def resnet() -> nn.Module:
    """ResNet-18 for 32x32 images, group normalisation."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    blocks, channels = [], 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(channels, width, stride), Block(width, width, 1)]
        channels = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mnist_cnn() -> nn.Module:
    """The small convolutional network for MNIST, tanh for a bounded activation."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def cifar_cnn() -> nn.Module:
    """Eight convolutions for CIFAR-10, tanh."""
    layers: list[nn.Module] = []
    channels = 3
    for width, pool in ((32, False), (32, True), (64, False), (64, True), (128, False), (128, True), (256, False)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()] + ([nn.AvgPool2d(2)] if pool else [])
        channels = width
    return nn.Sequential(*layers, nn.Conv2d(256, 10, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def images(n: int, *shape: int, classes: int = 10) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(n, *shape), torch.randint(classes, (n,)))


def tokens(n: int, length: int, words: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(words, (n, length)), torch.randint(classes, (n,)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1_000), nn.ReLU(), nn.Linear(1_000, 10))


WORKLOADS = (
    Workload("W1", "MLP 784-1000-10, lot 600", mlp, images(600, 784), 1.45),
    Workload("W2", "MNIST CNN, lot 256", mnist_cnn, images(256, 1, 28, 28), 1.2),
    Workload("W2b", "MNIST CNN, lot 2048", mnist_cnn, images(2048, 1, 28, 28), 1.0),
    Workload("W3", "CIFAR CNN, 8 convolutions, lot 64", cifar_cnn, images(64, 3, 32, 32), 1.25),
    Workload("W4", "ResNet-18 with GroupNorm, 32x32, lot 16", resnet, images(16, 3, 32, 32), 1.45),
    Workload("W5", "transformer d 256, 4 layers, length 128, lot 32", Encoder, tokens(32, 128, 1_000, 10), 1.3),
    Workload("W6", "linear on 3,969 features, lot 8,192", lambda: nn.Linear(3_969, 10), images(8_192, 3_969), 1.2),
    Workload("W7", "EmbeddingBag 50,000 x 128, lot 1,024", Bags, tokens(1_024, 64, 50_000, 2), 4.0, 2.5),
    Workload("epoch", "W2 with its sampler, 24 lots", mnist_cnn, images(256, 1, 28, 28), 1.0, epoch=235),
)


# -- candidates: each makes a step ---------------------------------------------------------------------


def plain(work: Workload, memory_format: torch.memory_format = torch.contiguous_format) -> Step:
    model, (x, y) = work.model(), work.lot()
    if work.epoch:
        return plain_epoch(work, model.to(memory_format=memory_format))
    if memory_format is torch.channels_last:
        model = model.to(memory_format=memory_format)
        x = x.contiguous(memory_format=memory_format) if x.dim() == 4 else x
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def plain_epoch(work: Workload, model: nn.Module) -> Step:
    from torch.utils.data import DataLoader, TensorDataset

    x, y = data_set(work)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x) // work.epoch, shuffle=True)
    batches = (batch for _ in itertools.count() for batch in loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    criterion = nn.CrossEntropyLoss()

    def lot() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return lambda: several(lot)


def data_set(work: Workload) -> tuple[Tensor, Tensor]:
    """As many examples as an epoch has, made of one lot again and again."""
    x, y = work.lot()
    return x.repeat(work.epoch, *[1] * (x.dim() - 1)), y.repeat(work.epoch)


def several(lot: Step) -> None:
    for _ in range(24):
        lot()


def terrine(work: Workload) -> Step:
    """A step of `sgd.private_steps`: on the same lot all the time, as for the others, or on drawn ones of an epoch."""
    from terrine import sgd
    from terrine.common.keys import Key
    from terrine.sgd.clipping import Clipper
    from terrine.sgd.release import StepRelease

    model, data = work.model(), data_set(work) if work.epoch else work.lot()
    lot = len(data[0]) // max(work.epoch, 1)
    plan = sgd.Plan(examples=100 * len(data[0]), lot=lot, steps=1_000_000, clip=CLIP, noise=NOISE, delta=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if work.epoch:
        plan = dataclasses.replace(plan, examples=len(data[0]))
        steps = sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss())

        def drawn() -> None:
            next(steps)
            optimizer.step()

        return lambda: several(drawn)
    clipper = Clipper(model, nn.CrossEntropyLoss())
    clipper.try_out(data)
    release = StepRelease(clipper.parameters, plan, Key.fresh())

    def step() -> None:
        release.add(clipper.add_up(data, release.rule))
        release.release(optimizer)
        optimizer.step()

    return step


def opacus(work: Workload, mode: str) -> Step:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    from opacus import GradSampleModule

    if work.epoch:
        raise NotImplementedError("no epoch of this one")
    model, (x, y) = ModuleValidator.fix(work.model()), work.lot()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    settings: dict[str, Any] = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": len(x)}
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "hooks":
        model = GradSampleModule(model)
        optimizer: Any = DPOptimizer(inner, **settings)
    else:
        model = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(inner, **settings)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


CANDIDATES: dict[str, Callable[[Workload], Step]] = {
    "plain": plain,
    "plain channels_last": lambda work: plain(work, torch.channels_last),
    "terrine": terrine,
    "opacus hooks": lambda work: opacus(work, "hooks"),
    "opacus ghost": lambda work: opacus(work, "ghost"),
}


# -- measuring -----------------------------------------------------------------------------------------


def resident(field: str) -> float:
    """VmRSS or VmHWM of this process, in megabytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    return math.nan


def load() -> None:
    """A step of the smallest model there is: the libraries' code is no memory of a step."""
    model = nn.Linear(2, 2)
    nn.CrossEntropyLoss()(model(torch.ones(3, 2)), torch.ones(3, dtype=torch.long)).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()


def serve(pipe: Any, name: str, candidate: str, threads: int) -> None:
    """A candidate's process: build, report memory, then for every message a turn, timed."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        step = CANDIDATES[candidate](next(work for work in WORKLOADS if work.name == name))
        load()
        gc.collect()
        before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        for _ in range(FIRST):
            step()
        pipe.send(("memory", resident("VmHWM") - before))
        while pipe.recv():
            turn(step, WARM)
            pipe.send(("time", turn(step, TURN)))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"))


def turn(step: Step, seconds: float) -> tuple[float, float]:
    """Steps for so long, one at least; a step's mean time by the wall, and of the processor."""
    steps, wall, busy = 0, time.perf_counter(), time.process_time()
    while not steps or time.perf_counter() - wall < seconds:
        step()
        steps += 1
    return (time.perf_counter() - wall) / steps, (time.process_time() - busy) / steps


def measure(work: Workload, candidates: list[str], rounds: int, threads: int, clock: int) -> dict[str, Any]:
    """Interleaved turns of every candidate."""
    context = multiprocessing.get_context("spawn")
    pipes, result = {}, {}
    for candidate in candidates:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, work.name, candidate, threads), daemon=True)
        process.start()
        there.close()
        kind, value = _ask(here)
        result[candidate] = {"memory": value, "times": []} if kind == "memory" else {"failed": value}
        if kind == "memory":
            pipes[candidate] = here
    begun, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begun < LEAST:
        for candidate, pipe in pipes.items():
            pipe.send(True)
            result[candidate]["times"].append(_ask(pipe)[1][clock])
        done += 1
    for pipe in pipes.values():
        pipe.close()
    return result


def _ask(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return "failed", "the process ended (out of memory?)"


def summary(work: Workload, raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, and ratios to the better plain step."""
    alive = {name: entry for name, entry in raw.items() if "times" in entry}
    medians = {name: statistics.median(entry["times"]) for name, entry in alive.items()}
    base = min((name for name in PLAIN if name in medians), key=lambda name: medians[name])
    rows = {}
    for name, entry in raw.items():
        if "failed" in entry:
            rows[name] = {"failed": entry["failed"]}
            continue
        ratios = [mine / theirs for mine, theirs in zip(entry["times"], alive[base]["times"], strict=True)]
        rows[name] = {
            "milliseconds": 1e3 * medians[name],
            "ratio": statistics.median(ratios),
            "megabytes": entry["memory"],
            "memory_ratio": entry["memory"] / alive[base]["memory"],
        }
    return {"about": work.about, "better_plain": base, "goal": work.time, "memory_goal": work.memory, "rows": rows}


def show(name: str, figures: dict[str, Any]) -> None:
    goals = f"  (want time <= {figures['goal']}, memory <= {figures['memory_goal']})" if figures["goal"] else ""
    print(f"\n{name}  {figures['about']}{goals}")
    for candidate, row in figures["rows"].items():
        if "failed" in row:
            print(f"  {candidate:22} failed: {row['failed']}")
            continue
        mark = " *" if candidate == figures["better_plain"] else ""
        print(
            f"  {candidate:22} {row['milliseconds']:9.2f} ms  {row['ratio']:7.2f} x"
            f"  {row['megabytes']:8.0f} MB  {row['memory_ratio']:6.2f} x{mark}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help="some of them, by name; all by default")
    parser.add_argument("--rounds", type=int, default=11, help="at least so many")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of wall time")
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES), help="some of the candidates")
    parser.add_argument("--json", help="write the figures to this file as well")
    given = parser.parse_args()
    figures = {}
    for work in WORKLOADS:
        if not given.workloads or work.name in given.workloads:
            raw = measure(work, given.only, given.rounds, given.threads, int(given.cpu_time))
            figures[work.name] = summary(work, raw)
            show(work.name, figures[work.name])
    if given.json:
        with open(given.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
