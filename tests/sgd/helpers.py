"""What several tests of DP-SGD share: criteria, accounts, and short runs whose every release is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terrine import sgd
from terrine.errors import BudgetExceeded
from terrine.events import Event


class Criterion(nn.Module):
    """A function of (output, target), as a criterion."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Tensor:
        return self.function(output, target)


class Notes:
    """An account that only takes notes, or refuses."""

    name = "notes"

    def __init__(self, *, refuse: bool = False) -> None:
        self.charges: list[Event] = []
        self.refuse = refuse

    def charge(self, event: Event, *, purpose: str, by: str) -> None:
        if self.refuse:
            raise BudgetExceeded("nothing left")
        self.charges.append(event)


class Turn(NamedTuple):
    """One turn of a loop."""

    step: sgd.PrivateStep
    gradient: Tensor
    """The noisy average, flat."""
    weights: dict[str, Tensor]
    """The parameters after the optimizer's step."""


def make_plan(**changes: Any) -> sgd.Plan:
    """Twelve examples, all in each of three lots, without noise; or what `changes` say."""
    given = {"examples": 12, "lot": 12, "steps": 3, "clip": 0.7, "noise": 0.0, "delta": 1e-5, "seed": 1}
    return sgd.Plan(**given | changes)


def whole_lots(examples: int, *, clip: Any = 1.0, steps: int = 1, **changes: Any) -> sgd.Plan:
    """A plan without noise whose lots are all examples."""
    return make_plan(examples=examples, lot=examples, clip=clip, steps=steps, **changes)


def make_optimizer(model: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    """Plain SGD of the trained parameters."""
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate)


def flatten(tensors: Any) -> Tensor:
    """Several tensors as one vector; of a dictionary, its values."""
    return torch.cat([one.detach().flatten() for one in (tensors.values() if isinstance(tensors, dict) else tensors)])


def run_loop(model: nn.Module, dataset: Any, plan: sgd.Plan, **options: Any) -> list[Turn]:
    """The contract's loop, to its end; every turn of it."""
    return list(each_turn(model, dataset, plan, **options))


def each_turn(
    model: nn.Module,
    dataset: Any,
    plan: sgd.Plan,
    *,
    loss: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Iterator[Turn]:
    """The same, turn by turn."""
    optimizer = optimizer or make_optimizer(model)
    for step in sgd.private_steps(model, optimizer, dataset, plan, loss=loss or nn.CrossEntropyLoss(), **options):
        gradient = flatten([one.grad for one in model.parameters() if one.requires_grad])
        optimizer.step()
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        yield Turn(step, gradient, weights)


def released_sum(model: nn.Module, dataset: Any, loss: Any, *, clip: Any = 1.0, **options: Any) -> Tensor:
    """The clipped sum that one step over all of a tuple of tensors releases, without noise."""
    count = len(dataset[0])
    plan = whole_lots(count, clip=clip)
    (turn,) = run_loop(model, dataset, plan, loss=loss, optimizer=make_optimizer(model, 0.0), **options)
    return count * turn.gradient


def distance(one: sgd.clipping.Clipped, other: sgd.clipping.Clipped) -> float:
    """How far two clipped sums are from each other."""
    assert one.sums.keys() == other.sums.keys()
    return float(flatten(one.sums).double().sub(flatten(other.sums).double()).norm())
