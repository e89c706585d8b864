"""Federated averaging in this process: local steps, noisy sums, a server's optimizer. [MMRHA17], [RCZ21]

    federation = Federation(model, plan, clients, local=Local(...), server=FedAvg())
    history = federation.fit()

Only `update`s leave a client, under its masks; what the server does with an opened sum is post-processing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine import check, sgd
from terrine.errors import InvalidArgument
from terrine.events import Event, Repeated
from terrine.federated.adding import add
from terrine.federated.drawing import Drawn, draw
from terrine.federated.plan import Adaptive, Plan
from terrine.federated.quantise import Floats, with_bit
from terrine.federated.secure.server import TooFewSurvivors
from terrine.federated.sums import Central
from terrine.mechanisms import exact
from terrine.receipts import Charged
from terrine.rng import SYSTEM, Seeded, Source

Rows = tuple[Tensor, Tensor]
Parameters = Iterable[nn.Parameter]


def _sgd(parameters: Parameters) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Local:
    """What a client does with the model it is sent.

    `private` adds example-level DP inside the client: every round it takes part in costs `private.event` for each of
    its examples, beside what the federated plan costs the client; see `Federation.example_event`.
    """

    optimizer: Callable[[Parameters], Optimizer] = _sgd
    epochs: int = 1
    batch: int = 32
    loss: Callable[[Tensor, Tensor], Tensor] = field(default_factory=nn.CrossEntropyLoss)
    private: sgd.Plan | None = None

    def train(self, model: nn.Module, rows: Rows) -> None:
        """Local steps on one client's rows, in place."""
        optimizer = self.optimizer(model.parameters())
        if self.private is not None:
            loss = copy.copy(self.loss)
            if hasattr(loss, "reduction"):
                loss.reduction = "none"
            sgd.Trainer(model, optimizer, loss, self.private, progress=False).fit(rows)
            return
        x, y = rows
        for _ in range(self.epochs):
            for part in torch.split(torch.randperm(len(y)), self.batch):
                optimizer.zero_grad()
                self.loss(model(x[part]), y[part]).backward()
                optimizer.step()


class ServerOptimizer(Protocol):
    """What turns noisy mean updates into new weights."""

    def optimizer(self, parameters: Parameters) -> Optimizer:
        """The optimizer that is fed minus the mean update as its gradient."""


@dataclass(frozen=True)
class FedAvg:
    """Add the mean update, times `learning_rate`; with momentum if wanted."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    def optimizer(self, parameters: Parameters) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)


@dataclass(frozen=True)
class FedAdam:
    """Adam on the mean updates."""

    learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-3

    def optimizer(self, parameters: Parameters) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.learning_rate, betas=self.betas, eps=self.eps)


@dataclass
class RoundHistory:
    """What a run did: public facts only."""

    rounds: int = 0
    closed: int = 0
    """Rounds with too few survivors: paid for, and nothing was opened."""
    survivors: list[int] = field(default_factory=list)
    """Shares of noise in every sum that was opened; empty where a central server adds the noise."""
    wrapped: float = 0.0
    """About how many entries of all sums wrapped around."""
    clips: list[float] = field(default_factory=list)


class Federation:
    """Trains `model` on clients' data by a plan.

    Guarantee: the weights after `fit`, and the history, cost at most `plan.event`. The account is charged for the whole
    plan before the first round, or with `by_round` for every round before its sum is opened.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        clients: Sequence[Rows],
        *,
        local: Local | None = None,
        server: ServerOptimizer | None = None,
        account: Charged | None = None,
        by_round: bool = False,
        dropping: float = 0.0,
        full: bool = True,
        silent: Iterable[int] = (),
    ) -> None:
        if len(clients) != plan.clients:
            raise InvalidArgument(f"{len(clients)} clients: want the plan's {plan.clients}")
        self.model, self.plan, self._clients = model, plan, clients
        self._local, self._account, self._by_round = local or Local(), account, by_round
        self._dropping, self._full = check.half_open_unit("dropping", dropping), full
        self._silent = frozenset(silent)
        self._optimizer = (server or FedAvg()).optimizer(model.parameters())
        self._rng: Source = SYSTEM if plan.seed is None else Seeded(plan.seed)
        self._bound = plan.clip.initial if isinstance(plan.clip, Adaptive) else plan.clip
        self.history = RoundHistory()
        size = sum(one.numel() for one in model.parameters()) + isinstance(plan.clip, Adaptive)
        if plan.dimension not in (None, size):
            raise InvalidArgument(f"plan.dimension={plan.dimension}: want the {size} entries of an update, or None")
        self._dimension = size

    @property
    def example_event(self) -> Event | None:
        """What example-level DP inside the clients costs one example if its client takes part in every round."""
        private = self._local.private
        return None if private is None else Repeated(private.event, times=self.plan.rounds)

    def fit(self, *, after: Callable[[int], Any] = lambda _: None) -> RoundHistory:
        """All rounds that are left; `after` is told the number of each."""
        while self.history.rounds < self.plan.rounds:
            self.round()
            after(self.history.rounds)
        return self.history

    def round(self) -> None:
        """One round: charge, draw, local steps, the noisy sum, the server's step."""
        if self.history.rounds >= self.plan.rounds:
            raise InvalidArgument(f"{self.plan.rounds} rounds are over: want a plan with more")
        if self._by_round:
            self._charge(self.plan.round_event)
        elif self.history.rounds == 0:
            self._charge(self.plan.event)
        self.history.rounds += 1
        drawn = draw(self.plan, self._rng)
        gone = self._gone(drawn)
        updates = {one: self._update(one) for one in drawn.contributing if one not in gone}
        try:
            opened = add(self.plan, drawn, updates, self._dimension, gone=gone, full=self._full, rng=self._rng)
        except TooFewSurvivors:
            self.history.closed += 1
            return
        if not isinstance(self.plan.sums, Central):  # with a central server, it would be how many were drawn
            self.history.survivors.append(opened.survivors)
        self.history.wrapped += opened.wrapped
        self._step(opened.value / self.plan.per_round)

    def _charge(self, event: Event) -> None:
        if self._account is not None:
            self._account.charge(event, purpose="federated learning", by="terrine.federated")

    def _gone(self, drawn: Drawn) -> set[int]:
        """Dropouts, alike for clients that were drawn and for those that stand in."""
        chances = exact.coins(Fraction(self._dropping), len(drawn.taking_part), self._rng)
        return {one for one, flag in zip(drawn.taking_part, chances, strict=True) if flag}

    def _update(self, client: int) -> Floats:
        """What a client contributes: its change of the weights and, where the bound adapts, whether it was within."""
        if client in self._silent:
            return np.zeros(self._dimension)
        model = copy.deepcopy(self.model)
        self._local.train(model, self._clients[client])
        with torch.no_grad():
            parts = [(new - old).flatten() for new, old in _pairs(model, self.model)]
            change: Floats = torch.cat(parts).double().cpu().numpy()
        if not isinstance(self.plan.clip, Adaptive):
            return change
        return with_bit(change, self._bound, self.plan.clip.weight)

    def _step(self, mean: Floats) -> None:
        if isinstance(self.plan.clip, Adaptive):
            share = float(mean[-1]) / self.plan.clip.weight + 0.5
            mean = mean[:-1] * self._bound
            self._bound = self.plan.clip.following(self._bound, share)
        self.history.clips.append(self._bound)
        self._optimizer.zero_grad()
        at = 0
        for one in self.model.parameters():
            part = torch.from_numpy(mean[at : at + one.numel()]).to(one)
            one.grad = -part.view_as(one)
            at += one.numel()
        self._optimizer.step()


def _pairs(first: nn.Module, second: nn.Module) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(first.parameters(), second.parameters(), strict=True)
