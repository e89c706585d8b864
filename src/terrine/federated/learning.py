"""Federated averaging in this process: local steps, noisy sums, a server's optimizer. [MMRHA17], [RCZ21]

    federation = Federation(model, plan, clients, local=Local(...), server=FedAvg())
    history = federation.fit()

Only `update`s leave a client, under its masks; what the server does with an opened sum is post-processing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine import check, sgd
from terrine.common import generators
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Event, Repeated
from terrine.federated.adding import add, exact_sum
from terrine.federated.checkpoint import FederationCheckpoint
from terrine.federated.drawing import Drawn, Turns, draw
from terrine.federated.keyed import KeyedSource
from terrine.federated.plan import AdaptiveClipping, Plan
from terrine.federated.quantise import Floats, with_bit
from terrine.federated.sampling import MinimumSeparation
from terrine.federated.secure.opening import OpenedSum
from terrine.federated.secure.server import TooFewSurvivors
from terrine.federated.sums import Central
from terrine.mechanisms import exact
from terrine.receipts import Charged, Payment, Receipt
from terrine.rng import Source
from terrine.sgd import fingerprint
from terrine.sgd.correlated import CorrelatedNoise

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

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            object.__setattr__(self, name, check.whole(name, getattr(self, name)))
        for name in ("optimizer", "loss"):
            if not callable(getattr(self, name)):
                raise check.refuse(name, getattr(self, name), "a function")
        if not isinstance(self.private, sgd.Plan | None):
            raise check.refuse("private", self.private, "sgd.Plan(...), or nothing")

    def train(self, model: nn.Module, rows: Rows, *, secret: bytes | None = None) -> None:
        """Local steps on one client's rows, in place; example-level noise comes from `secret` where there is one."""
        optimizer = self.optimizer(model.parameters())
        if self.private is not None:
            inside = copy.copy(self.private)  # its price is the plan's own: nobody knows the seed
            object.__setattr__(inside, "seed", None if secret is None else int.from_bytes(secret))
            loss = copy.copy(self.loss)
            if hasattr(loss, "reduction"):
                loss.reduction = "none"
            sgd.Trainer(model, optimizer, loss, inside, progress=False).fit(rows)
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "learning_rate", check.positive("learning_rate", self.learning_rate))
        object.__setattr__(self, "momentum", check.half_open_unit("momentum", self.momentum))

    def optimizer(self, parameters: Parameters) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)


@dataclass(frozen=True)
class FedAdam:
    """Adam on the mean updates."""

    learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-3

    def __post_init__(self) -> None:
        betas = check.listed("betas", self.betas, "two numbers")
        if len(betas) != 2:
            raise check.refuse("betas", self.betas, "two numbers")
        object.__setattr__(self, "betas", tuple(check.half_open_unit("betas", one) for one in betas))
        for name in ("learning_rate", "eps"):
            object.__setattr__(self, name, check.positive(name, getattr(self, name)))

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


@dataclass(frozen=True)
class _Paid:
    """For how many rounds which account was charged."""

    rounds: int = 0
    account: str | None = None
    charge: str | None = None


class Federation:
    """Trains `model` on clients' data by a plan.

    `present` says who checked in for a round (counted from 0), where the plan's sampling is `MinimumSeparation`. With
    `checkpoint` the run is saved after every round, and goes on from there: to the same model, not charged again.

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
        present: Callable[[int], Iterable[int]] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        _check_kinds(model, plan, local, server, account, present)
        clients = _checked_rows(clients)
        if len(clients) != plan.clients:
            raise InvalidArgument(f"{len(clients)} clients: want the plan's {plan.clients}")
        if by_round and not plan.by_round:
            raise InvalidArgument(
                "by_round=True: rounds of this plan have no price of their own, because noise or clients of one round "
                "depend on others; want by_round=False, which charges the whole plan first"
            )
        if present is not None and not isinstance(plan.sampling, MinimumSeparation):
            raise InvalidArgument("present=: this plan draws clients itself; want sampling=MinimumSeparation(...)")
        self.model, self.plan, self._clients = model, plan, clients
        self._local, self._server, self._by_round = local or Local(), server or FedAvg(), by_round
        self._payment = Payment(account, "federated learning", "terrine.federated")
        self._dropping, self._full = check.half_open_unit("dropping", dropping), full
        indices = check.listed("silent", silent, "a list of clients")
        self._silent = frozenset(check.whole("silent", one, at_least=0) for one in indices)
        self._present, self._trained = present, [one for one in model.parameters() if one.requires_grad]
        if not self._trained:
            raise InvalidArgument("model: no parameter that is trained; want one or more with requires_grad=True")
        self._optimizer = self._server.optimizer(self._trained)
        self._bound = plan.clip.initial if isinstance(plan.clip, AdaptiveClipping) else plan.clip
        self._turns: Turns = {}
        self._paid, self._known = _Paid(), False  # known: to be this account's, not another's before a restart
        self.history, self._begun = RoundHistory(), 0  # what is told may be changed; what decides the noise may not
        size = sum(one.numel() for one in self._trained) + isinstance(plan.clip, AdaptiveClipping)
        if plan.dimension not in (None, size):
            raise InvalidArgument(f"plan.dimension={plan.dimension}: want the {size} entries of an update, or None")
        self._dimension = size
        self._key = Key.fresh() if plan.seed is None else Key.seeded(plan.seed)
        self._kept = None if checkpoint is None else FederationCheckpoint(checkpoint)
        if self._kept is not None:
            self._restore(self._kept)
        self._correlated: CorrelatedNoise | None = None
        if plan.bands > 1:
            assert plan.correlated is not None
            self._correlated = CorrelatedNoise(plan.correlated, self._key, [torch.empty(size, device="cpu")])

    @property
    def example_event(self) -> Event | None:
        """What example-level DP inside the clients costs one example if its client takes all of its turns."""
        private = self._local.private
        return None if private is None else Repeated(private.event, times=self.plan.turns)

    def fit(self, *, after: Callable[[int], Any] = lambda _: None) -> RoundHistory:
        """All rounds that are left; `after` is told the number of each."""
        while self._begun < self.plan.rounds:
            self.round()
            after(self._begun)
        return self.history

    def round(self) -> None:
        """One round: charge, draw, local steps, the noisy sum, the server's step.

        Raises:
            OutOfOrder: the plan's rounds are over, or another run went on from the checkpoint.
            BudgetExceeded: the account has not enough left; no client was drawn.
        """
        if self._begun >= self.plan.rounds:
            raise OutOfOrder(f"{self.plan.rounds} rounds are over: want a plan with more")
        if self._kept is not None:
            self._kept.take_over(self._begun)
        self._pay()
        number = self._begun
        self._begun = self.history.rounds = number + 1
        rng = KeyedSource(self._key.secret, f"round {number}", reproducible=self.plan.seed is not None)
        present = None if self._present is None else self._present(number)
        drawn = draw(self.plan, rng, key=self._key, round_=number, turns=self._turns, present=present)
        gone = self._gone(drawn, rng)
        before = [one.detach().clone() for one in self._of_model()]
        updates = self._updates([one for one in drawn.contributing if one not in gone])
        self._demand_untouched(before)
        if self._kept is not None:
            noted = torch.from_numpy(exact_sum(self.plan, updates, self._dimension))
            self._kept.before_release(number, noted)
        try:
            opened = self._sum(number, drawn, updates, gone, rng)
        except TooFewSurvivors:
            self.history.closed += 1
        else:
            if not isinstance(self.plan.sums, Central):  # with a central server, it would be how many were drawn
                self.history.survivors.append(opened.survivors)
            self.history.wrapped += opened.wrapped
            self._step(opened.value / self.plan.per_round)
        self._save()

    def _of_model(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _demand_untouched(self, before: Sequence[Tensor]) -> None:
        """Refuse a round in which the clients' training reached the server's model: no noise is on that."""
        now = self._of_model()
        with torch.no_grad():
            moved = [one for one, old in zip(now, before, strict=True) if not torch.equal(one, old)]
            for one, old in zip(now, before, strict=True):
                one.copy_(old)
        if moved:
            raise InvalidArgument(
                "local: its training changed the server's model itself, past clipping and noise; want it to change the "
                "copy that it is given; the model is as it was before the round"
            )

    def _sum(self, number: int, drawn: Drawn, updates: Mapping[int, Floats], gone: set[int], rng: Source) -> OpenedSum:
        if self._correlated is None:
            return add(self.plan, drawn, updates, self._dimension, gone=gone, full=self._full, rng=rng)
        total = torch.from_numpy(exact_sum(self.plan, updates, self._dimension))
        self._correlated.protect([total], number, self.plan.deviation)
        return OpenedSum(total.numpy(), len(set(drawn.taking_part) - gone), 0.0)

    def _pay(self) -> None:
        """Charge what is next, unless a run that goes on was charged for it before."""
        number = self._begun
        event = self.plan.round_event if self._by_round else self.plan.event
        paid, known = self._paid, self._known
        self._known = True
        if paid.rounds > number and (known or self._payment.was_charged(Receipt(event, paid.account, paid.charge))):
            return
        receipt = self._payment.charge(event)
        rounds = number + 1 if self._by_round else self.plan.rounds
        self._paid = _Paid(rounds, receipt.account, receipt.charge)
        self._save()

    def _restore(self, kept: FederationCheckpoint) -> None:
        """Go on from where the file is, if there is one."""
        settings = {
            "local training": self._local, "server": [type(self._server), self._server], "presence": self._present,
            "dropout rate": self._dropping, "way of adding up": self._full, "way of charging": self._by_round,
            "set of silent clients": sorted(self._silent), "data set": list(self._clients),
        }  # fmt: skip
        prints = {name: fingerprint.of_value(one) for name, one in settings.items()}
        prints["model"] = fingerprint.of_model(self.model)
        found = kept.open(repr(self.plan), self.plan.rounds, prints)
        if found is None:
            return
        record = found.record
        try:
            self.model.load_state_dict(record["model"])
            self._optimizer.load_state_dict(record["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"{kept.path}: a run of another model or server ({reason})") from None
        self.history, self._bound = RoundHistory(**record["history"]), record["bound"]
        self._turns, self._paid, self._begun = record["turns"], _Paid(**record["paid"]), record["rounds"]
        self._key = found.key or self._key

    def _save(self) -> None:
        if self._kept is None:
            return
        record = {
            "plan": repr(self.plan), "rounds": self._begun, "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(), "history": dataclasses.asdict(self.history),
            "bound": self._bound, "turns": self._turns, "paid": dataclasses.asdict(self._paid),
        }  # fmt: skip
        self._kept.save(record, self._key, over=self._begun >= self.plan.rounds)

    def _gone(self, drawn: Drawn, rng: Source) -> set[int]:
        """Dropouts, alike for clients that were drawn and for those that stand in."""
        chances = exact.coins(Fraction(self._dropping), len(drawn.taking_part), rng)
        return {one for one, flag in zip(drawn.taking_part, chances, strict=True) if flag}

    def _updates(self, clients: Sequence[int]) -> dict[int, Floats]:
        """What these clients contribute; what they draw comes from the run's key, and is the same when repeated."""
        with generators.untouched():
            generators.seed(self._key.draw(Purpose.TRAINING, self._begun).seed(0))
            return {one: self._update(one) for one in clients}

    def _update(self, client: int) -> Floats:
        """What a client contributes: its change of the weights and, where the bound adapts, whether it was within."""
        if client in self._silent:
            return np.zeros(self._dimension)
        model = copy.deepcopy(self.model)
        secret = self._key.draw(Purpose.TRAINING, self._begun).seed(client + 1)
        self._local.train(model, self._clients[client], secret=secret)
        with torch.no_grad():
            new = [one for one in model.parameters() if one.requires_grad]
            if [one.shape for one in new] != [one.shape for one in self._trained]:
                raise InvalidArgument("local: its training froze, added or replaced parameters; want them as they were")
            parts = [(one - old).flatten().double() for one, old in zip(new, self._trained, strict=True)]
            change: Floats = torch.cat(parts).cpu().numpy()
        if not isinstance(self.plan.clip, AdaptiveClipping):
            return change
        return with_bit(change, self._bound, self.plan.clip.weight)

    def _step(self, mean: Floats) -> None:
        if isinstance(self.plan.clip, AdaptiveClipping):
            share = float(mean[-1]) / self.plan.clip.weight + 0.5
            mean = mean[:-1] * self._bound
            self._bound = self.plan.clip.following(self._bound, share)
        self.history.clips.append(self._bound)
        self._optimizer.zero_grad()
        at = 0
        for one in self._trained:
            part = torch.from_numpy(mean[at : at + one.numel()]).to(one)
            one.grad = -part.view_as(one)
            at += one.numel()
        self._optimizer.step()


def _check_kinds(model: object, plan: object, local: object, server: object, account: object, present: object) -> None:
    """Other kinds of values would be found out later, by errors that say nothing."""
    if not isinstance(plan, Plan):
        raise check.refuse("plan", plan, "federated.Plan(...)")
    if not isinstance(model, nn.Module):
        raise check.refuse("model", model, "a torch module")
    methods = {"local": (local, "train", "federated.Local(...)"), "server": (server, "optimizer", "federated.FedAvg()"),
               "account": (account, "charge", "an account of a ledger")}  # fmt: skip
    for name, (value, method, wanted) in methods.items():
        if value is not None and (isinstance(value, type) or not callable(getattr(value, method, None))):
            raise check.refuse(name, value, f"{wanted}, or nothing")
    if present is not None and not callable(present):
        raise check.refuse("present", present, "a function of the round's number, or nothing")


def _checked_rows(clients: object) -> list[Rows]:
    """Every client's inputs and labels."""
    found = check.listed("clients", clients, "a list of (inputs, labels), one for every client")
    for place, one in enumerate(found):
        pair = isinstance(one, tuple | list) and len(one) == 2 and all(isinstance(part, Tensor) for part in one)
        if not pair or not one[0].ndim or not one[1].ndim or len(one[0]) != len(one[1]):
            raise InvalidArgument(f"clients[{place}]: want two tensors, inputs and labels, of as many rows")
    return found
