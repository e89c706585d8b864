"""Federated averaging in this process: local steps, noisy sums, a server's optimizer. [MMRHA17], [RCZ21]

    federation = Federation(model, plan, clients, local=Local(...), server=FedAvg())
    history = federation.fit()

Only `update`s leave a client, under its masks; what the server does with an opened sum is post-processing.

With a checkpoint a run survives a crash as one of `terrine.sgd` does (`sgd/checkpoint.py`): a round is counted on disk
before its sum is opened, and whoever goes on begins after the count, with fresh randomness, from the newest saved
model. What has to stay the same for the whole run does: the groups and the order of clients come from the secret beside
the count, and the turns that clients have had are saved before the round they are for is counted.
"""

from __future__ import annotations

import copy
import dataclasses
import os
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
from terrine.common.correlated import CorrelatedNoise
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Event, Repeated, Reproducible
from terrine.federated.adding import add, exact_sum
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
from terrine.sgd.checkpoint import Checkpoint, KeptRun, load_run
from terrine.sgd.loss import Loss, as_loss

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
    loss: Loss = field(default_factory=nn.CrossEntropyLoss)
    """A function of (model, batch), or a criterion; where nothing is private inside, of a whole batch."""
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
            sgd.Trainer(model, optimizer, self.loss, inside, progress=False).fit(rows)
            return
        (x, y), loss = rows, as_loss(self.loss)
        for _ in range(self.epochs):
            for part in torch.split(torch.randperm(len(y)), self.batch):
                optimizer.zero_grad()
                loss(model, (x[part], y[part])).backward()
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
    lost: int = 0
    """Rounds that a crash took: paid for, and not in the model."""


@dataclass(frozen=True)
class _Paid:
    """For how many rounds which account was charged."""

    rounds: int = 0
    account: str | None = None
    charge: str | None = None


@dataclass
class _Progress:
    """What a checkpoint holds beside model and optimizer."""

    history: RoundHistory = field(default_factory=RoundHistory)
    paid: _Paid = field(default_factory=_Paid)
    turns: Turns = field(default_factory=dict)
    drawn: int = 0
    """The rounds whose clients are in `turns`."""

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.history, self.paid = RoundHistory(**state["history"]), _Paid(**state["paid"])
            self.turns, self.drawn = state["turns"], state["drawn"]
        except (KeyError, TypeError) as error:
            raise InvalidArgument(f"checkpoint: not of a federation ({error}); want another path") from None


class Federation:
    """Trains `model` on clients' data by a plan.

    `present` says who checked in for a round (counted from 0), where the plan's sampling is `MinimumSeparation`. With
    `checkpoint` the run is saved after every round. One that was killed goes on after the last round it may have
    opened, from the newest saved model, and is not charged again; one process at a time, until `close`.

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
        self._progress, self._known = _Progress(), False  # known: paid by this account, not another before a restart
        self._begun, self._closed = 0, False  # what history tells may be changed; what decides the noise may not
        size = sum(one.numel() for one in self._trained) + isinstance(plan.clip, AdaptiveClipping)
        if plan.dimension not in (None, size):
            raise InvalidArgument(f"plan.dimension={plan.dimension}: want the {size} entries of an update, or None")
        self._dimension = size
        self._key = self._order = Key.fresh() if plan.seed is None else Key.seeded(plan.seed)
        self._kept = None if checkpoint is None else KeptRun(_checked_place(checkpoint), repr(plan))
        if self._kept is not None:
            self._restore(self._kept)
        self._correlated: CorrelatedNoise | None = None
        if plan.bands > 1:
            assert plan.correlated is not None
            numbers = [torch.empty(size, device="cpu")]
            self._correlated = CorrelatedNoise(plan.correlated, self._key, numbers, first=self._begun)

    @property
    def history(self) -> RoundHistory:
        """What the run did so far."""
        return self._progress.history

    @property
    def example_event(self) -> Event | None:
        """What example-level DP inside the clients costs one example if its client takes all of its turns."""
        if self._local.private is None:
            return None
        event = Repeated(self._local.private.event, times=self.plan.turns)
        return event if self.plan.seed is None else Reproducible(event)

    def fit(self, *, after: Callable[[int], Any] = lambda _: None) -> RoundHistory:
        """All rounds that are left; `after` is told the number of each."""
        try:
            while self._begun < self.plan.rounds:
                self.round()
                after(self._begun)
        except BaseException:
            self.close()
            raise
        return self.history

    def round(self) -> None:
        """One round: charge, draw, local steps, the noisy sum, the server's step.

        Raises:
            OutOfOrder: the plan's rounds are over, the run was closed, or nothing can be written.
            BudgetExceeded: the account has not enough left; no client was drawn.
        """
        if self._begun >= self.plan.rounds:
            raise OutOfOrder(f"{self.plan.rounds} rounds are over: want a plan with more")
        if self._closed:
            raise OutOfOrder("the run was closed, or an error ended it; want Federation(..., checkpoint=path) again")
        try:
            self._go_through(self._begun)
        except BaseException:
            self.close()
            raise
        if self._begun >= self.plan.rounds:
            self.close()

    def close(self) -> None:
        """Let another process go on with the run, where there is a checkpoint; an error in a round does so, too."""
        if self._kept is None or self._closed:
            return
        self._closed = True
        if self._begun or self._kept.path.exists():
            self._kept.count.close()
        else:
            self._kept.count.remove()

    def _go_through(self, number: int) -> None:
        """One round, from the charge to the save."""
        self._pay(number)
        self._begun = self.history.rounds = number + 1
        rng = KeyedSource(self._key.secret, f"round {number}", reproducible=self.plan.seed is not None)
        present = None if self._present is None else self._present(number)
        turns = self._progress.turns
        drawn = draw(self.plan, rng, key=self._order, round_=number, turns=turns, present=present)
        gone = self._gone(drawn, rng)
        before = [one.detach().clone() for one in self._of_model()]
        updates = self._updates([one for one in drawn.contributing if one not in gone])
        self._demand_untouched(before)
        self._count(number)
        try:
            opened = self._sum(number, drawn, updates, gone, rng)
        except TooFewSurvivors:
            self.history.closed += 1
        else:
            if not isinstance(self.plan.sums, Central):  # with a central server, it would be how many were drawn
                self.history.survivors.append(opened.survivors)
            self.history.wrapped += opened.wrapped
            self._step(opened.value / self.plan.per_round)
        self._save(self._begun)

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

    def _pay(self, number: int) -> None:
        """Charge what is next, unless a run that goes on was charged for it before."""
        event = self.plan.round_event if self._by_round else self.plan.event
        paid, known = self._progress.paid, self._known
        self._known = True
        if paid.rounds > number and (known or self._payment.was_charged(Receipt(event, paid.account, paid.charge))):
            return
        receipt = self._payment.charge(event)
        rounds = number + 1 if self._by_round else self.plan.rounds
        self._progress.paid = _Paid(rounds, receipt.account, receipt.charge)
        self._save(number)

    def _count(self, number: int) -> None:
        """Put on disk that a round's sum is opened, and first who had a turn in it."""
        if self._kept is None:
            return
        if isinstance(self.plan.sampling, MinimumSeparation):
            self._progress.drawn = number + 1
            self._save(number)
        self._kept.count.advance(number + 1)

    def _restore(self, kept: KeptRun) -> None:
        """Go on after the rounds that were counted, from the newest model."""
        try:
            kept.begin(limit=self.plan.rounds, looks=None, charged_to=None)
            kept.keep({"progress": self._progress})
            if self.plan.seed is None:
                self._order = Key(kept.count.secret)
            if kept.record is None:
                return
            load_run(kept.path, self.model, self._optimizer, (kept.record["model"], kept.record["optimizer"]))
            self._begun, self._bound = kept.count.number, kept.record["bound"]
            self._check_turns(kept.path)
            self.history.rounds = self._begun
            self.history.lost += self._begun - kept.record["taken"]
        except BaseException:
            kept.count.close()
            raise
        if self._begun >= self.plan.rounds:
            self.close()

    def _check_turns(self, path: Path) -> None:
        """All turns of the rounds that were counted are known; those of a round that was not are still to be had."""
        progress = self._progress
        if isinstance(self.plan.sampling, MinimumSeparation) and progress.drawn < self._begun:
            raise InvalidArgument(
                f"{path}: an older copy, without the turns that clients had in rounds {progress.drawn + 1} to "
                f"{self._begun}; want the newest, or another path, where a fresh run has to be paid for"
            )
        for client, rounds in progress.turns.items():
            progress.turns[client] = [one for one in rounds if one < self._begun]

    def _save(self, seen: int) -> None:
        """Save everything; the model has seen so many rounds."""
        if self._kept is not None:
            self._kept.save(seen, self._bound, self.model.state_dict(), self._optimizer.state_dict())

    def _gone(self, drawn: Drawn, rng: Source) -> set[int]:
        """Dropouts, alike for clients that were drawn and for those that stand in."""
        chances = exact.coins(Fraction(self._dropping), len(drawn.taking_part), rng)
        return {one for one, flag in zip(drawn.taking_part, chances, strict=True) if flag}

    def _updates(self, clients: Sequence[int]) -> dict[int, Floats]:
        """What these clients contribute; what they draw comes from the run's key."""
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


def _checked_place(place: object) -> Checkpoint:
    if not isinstance(place, str | os.PathLike) or not str(place):
        raise check.refuse("checkpoint", place, "a path, or nothing")
    path = Path(place).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise check.refuse("checkpoint", place, "a file in a folder that exists")
    return Checkpoint(path)


def _checked_rows(clients: object) -> list[Rows]:
    """Every client's inputs and labels."""
    found = check.listed("clients", clients, "a list of (inputs, labels), one for every client")
    for place, one in enumerate(found):
        pair = isinstance(one, tuple | list) and len(one) == 2 and all(isinstance(part, Tensor) for part in one)
        if not pair or not one[0].ndim or not one[1].ndim or len(one[0]) != len(one[1]):
            raise InvalidArgument(f"clients[{place}]: want two tensors, inputs and labels, of as many rows")
    return found
