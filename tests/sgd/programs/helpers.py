"""What the programs share: small data, hostile examples, the slow obvious clipped sum, and what to compare.

A program is a function that builds everything afresh, state included, so that one run never sees another's.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 as everybody writes it
from torch.utils import _pytree as pytree

from terrine import sgd

CLIP = 2.6  # about half of the benign gradients are longer: what only scales a loss shows as well
LOT = 16
SLACK = 1 + 1e-5


@dataclass
class Parts:
    """What a program hands to the library, and what its user does in the loop."""

    model: nn.Module
    loss: Any
    batch: Any = None
    loop: Callable[..., Any] | None = None
    """loop(steps, model, optimizer): the user's own code around the steps."""
    optimizer: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    """What is passed on by name: reads_values, memory, and for private_steps collate and others."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    kept: Any = None
    """A container of the user's in which values of examples could be read afterwards."""
    dataset: Any = None
    """What private_steps is given, where it is not a TensorDataset of the batch."""
    exact: bool = True
    """Whether each release can be compared with the reference at the parameters of that moment."""
    plain: Any = None
    """The same loss as the reference computes it, where the reference cannot run it."""
    warm_up: int = 0
    """How many benign lots come before the hostile example does."""
    first_loss: Any = None
    """Another loss, whose lots came before, with the same model."""
    holds: Any = None
    """What the user's own script keeps alive."""
    random: bool = False
    tolerance: float = 1e-8


def as_parts(built: Any) -> Parts:
    return built if isinstance(built, Parts) else Parts(*built)


def build(program: Callable[..., Any], *given: Any) -> Parts:
    """A fresh copy of the whole program, the same one every time."""
    seed_all()
    return as_parts(program(*given[: len(inspect.signature(program).parameters)]))


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


# Data: every kind has LOT + 8 benign examples, and a way to make one hostile example.


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(LOT + 8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (LOT + 8,), generator=generator)


def single() -> tuple[Tensor, Tensor]:
    x, y = table()
    return x.float(), y


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(LOT + 8, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (LOT + 8,), generator=generator)


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 9, (LOT + 8, 5), generator=generator), torch.randint(0, 3, (LOT + 8,), generator=generator)


KINDS = {"table": table, "single": single, "images": images, "tokens": tokens}
SIZES = {"big": 1e3, "huge": 1e30, "tiny": 1e-30, "nan": math.nan, "inf": math.inf}
HOSTILE = {
    "table": ("big", "huge", "nan", "inf", "tiny", "label"),
    "single": ("big", "huge", "nan", "inf", "tiny", "label"),
    "images": ("big", "huge", "nan", "inf", "tiny", "label"),
    "tokens": ("rare", "unknown", "label"),
}


def hostile(kind: str, variant: str) -> tuple[Tensor, Tensor]:
    """One example that tries to do more than its share."""
    x, y = (leaf[:1].clone() for leaf in KINDS[kind]())
    if variant == "label":
        return x, torch.full_like(y, 7)
    if kind == "tokens":
        return torch.full_like(x, {"rare": 9, "unknown": 99}[variant]), y
    return SIZES[variant] * (1 + x.abs()), torch.zeros_like(y)


def insert(batch: Any, example: Any, place: int) -> Any:
    return pytree.tree_map(lambda rows, row: torch.cat([rows[:place], row, rows[place:]]), batch, example)


def lots(kind: str) -> list[Any]:
    x, y = KINDS[kind]()
    cuts = ((0, LOT), (LOT, LOT + 4), (LOT + 4, LOT + 8))
    return [(x[start:stop].clone(), y[start:stop].clone()) for start, stop in cuts]


# Models that many programs share.


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


# The slow obvious way.


def length(batch: Any) -> int:
    return len(pytree.tree_leaves(batch)[0])


def example(batch: Any, index: int) -> Any:
    """A batch of one, alone: it shares no memory with the others."""
    return pytree.tree_map(lambda rows: rows[index : index + 1].clone(), batch)


def call(loss: Any, model: nn.Module, batch: Any) -> Tensor:
    if isinstance(loss, nn.Module):
        x, y = batch
        return loss(model(x), y)
    return loss(model, batch)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def reference(model: nn.Module, loss: Any, batch: Any, clip: float) -> tuple[dict[str, Tensor], Tensor]:
    """Sums and norms by one backward pass for each example; what fails or is not finite adds zero."""
    parameters = trained(model)
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    norms = []
    for index in range(length(batch)):
        try:
            value = call(loss, model, example(batch, index)).sum()
            gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        except Exception:
            norms.append(math.nan)
            continue
        dense = [
            torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for p, g in zip(parameters.values(), gradients, strict=True)
        ]
        norm = float(torch.cat([g.double().flatten() for g in dense]).norm())
        norms.append(norm)
        if math.isfinite(norm):
            for name, gradient in zip(parameters, dense, strict=True):
                sums[name] += gradient * min(1.0, clip / norm if norm else 1.0)
    return sums, torch.tensor(norms, dtype=torch.float64)


# What a run shows the world.


@dataclass
class Trace:
    """Everything that a run released or left behind."""

    sums: list[Tensor] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)
    moved: bool = False
    """Whether the run changed its parameters: then only its first step compares with another run's."""
    state: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def flat(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([sums[name].detach().double().flatten() for name in sorted(sums)] or [torch.zeros(0)])


def left_behind(parts: Parts) -> dict[str, Any]:
    """What could be published with the model: its state, its gradients, its modes, the optimizer's settings."""
    model = parts.model
    found: dict[str, Any] = {f"state {name}": value.detach().clone() for name, value in tensors_of(model).items()}
    found |= {f"trained {name}": value.requires_grad for name, value in model.named_parameters()}
    found |= {f"mode {name}": module.training for name, module in model.named_modules()}
    for place, group in enumerate(getattr(parts.optimizer, "param_groups", ())):
        found |= {f"group {place} {name}": value for name, value in group.items() if name != "params"}
    return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def readable(kept: Any) -> list[str]:
    """The numbers that a user could read in a container after the run."""
    found = []
    for leaf in pytree.tree_leaves(list(kept.values()) if isinstance(kept, dict) else list(kept)):
        try:
            found += [repr(value) for value in torch.as_tensor(leaf).detach().flatten().tolist()]
        except Exception:  # a tensor of a transform that is over: nothing can be read
            continue
    return found


def sums_of_lots(program: Callable[..., Any], lots: list[Any]) -> Trace:
    """The lots one after the other, through `clipped_sum`."""
    parts, trace = build(program, lots[0]), Trace()
    if parts.first_loss is not None:
        train_before(parts, lots[1])
    for place, lot in enumerate([*[lots[1]] * parts.warm_up, *lots]):
        lot = pytree.tree_map(torch.clone, lot)  # programs write into their examples
        seed_all()
        with parts.around():
            clipped = sgd.clipped_sum(parts.model, parts.loss, lot, clip=CLIP, **shared_options(parts))
        if place >= parts.warm_up:
            trace.sums.append(flat(clipped.sums))
    trace.state = left_behind(parts)
    trace.state |= {f"gradient {name}": p.grad for name, p in parts.model.named_parameters()}
    trace.kept = readable(parts.kept or ())
    return trace


def train_before(parts: Parts, batch: Any) -> None:
    """What the user did with the same model earlier in the session."""
    for _ in range(5):
        sgd.clipped_sum(parts.model, parts.first_loss, batch, clip=CLIP)


def shared_options(parts: Parts) -> dict[str, Any]:
    return {name: value for name, value in parts.options.items() if name in ("reads_values", "memory", "rows")}


class Watched:
    """Steps as the user iterates over them; what each hands over is noted before the user can touch it."""

    def __init__(self, steps: Any, parts: Parts, batch: Any, trace: Trace) -> None:
        self.steps, self.parts, self.batch, self.trace = steps, parts, batch, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps:
            self._note()
            yield step

    def _note(self) -> None:
        parts = self.parts
        given = trained(parts.model)
        released = {n: torch.zeros_like(p) if p.grad is None else p.grad * length(self.batch) for n, p in given.items()}
        self.trace.sums.append(flat(released))
        if parts.exact and parts.loop is not None:
            with torch.enable_grad(), torch.random.fork_rng(), torch.autocast("cpu", enabled=False):
                model = copy.deepcopy(parts.model).train()
                self.trace.expected.append(flat(reference(model, parts.loss, self.batch, CLIP)[0]))


class Items(torch.utils.data.Dataset[Any]):
    """The examples of a batch, one by one, in the batch's own structure."""

    def __init__(self, batch: Any) -> None:
        self.rows = pytree.tree_map(torch.clone, batch)

    def __len__(self) -> int:
        return length(self.rows)

    def __getitem__(self, index: int) -> Any:
        return pytree.tree_map(lambda rows: rows[index], self.rows)


def ordinary(steps: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in steps:
        optimizer.step()


def steps_of_run(program: Callable[..., Any], batch: Any, *, steps: int = 3) -> Trace:
    """A run of `private_steps` without noise, every example in every lot."""
    parts, trace, size = build(program, batch), Trace(), length(batch)
    if parts.optimizer is None:
        rate = 0.0 if parts.loop is None else 0.1  # without a loop of its own a run stays where it is
        parts.optimizer = torch.optim.SGD([p for p in parts.model.parameters() if p.requires_grad], lr=rate)
    trace.moved = any(group["lr"] for group in parts.optimizer.param_groups)
    plan = sgd.Plan(
        examples=size, lot=size, steps=steps, clip=CLIP, noise=0.0, delta=1e-5, seed=1 if parts.random else None
    )
    dataset = parts.dataset or Items(batch)
    if parts.first_loss is not None:
        train_before(parts, batch)
    with parts.around():
        given = sgd.private_steps(parts.model, parts.optimizer, dataset, plan, loss=parts.loss, **parts.options)
        (parts.loop or ordinary)(Watched(given, parts, batch, trace), parts.model, parts.optimizer)
    trace.state = left_behind(parts)
    trace.kept = readable(parts.kept or ())
    return trace


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(
            one.double(), other.double(), rtol=1e-9, atol=1e-12, equal_nan=True
        )
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other) or repr(one) == repr(other)


def is_one_line(message: str) -> bool:
    return bool(message.strip()) and "\n" not in message


def names_the_thing(message: str, names: str) -> bool:
    return re.search(names, message, re.IGNORECASE) is not None
