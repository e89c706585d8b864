"""On Flower's message API: a mod for the ClientApp and a strategy for the ServerApp, and the app is private.

    client_app.py    app = ClientApp(mods=[flower.private_mod(plan)])
    server_app.py    strategy = flower.SecureSumStrategy(plan, account=account)
                     strategy.start(grid, initial_arrays=..., num_rounds=plan.rounds)

Both are given the same plan. `configure_train` charges, draws the clients and exchanges their keys; `aggregate_train`
adds up masked whole numbers, asks for the shares of masks and opens the sum. The mod hands the app's update on under
its masks and nothing else: no metrics, no number of examples. Clients are not asked to evaluate.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from terrine.errors import InvalidArgument, MissingExtra, OutOfOrder, TerrineError
from terrine.federated import quantise
from terrine.federated.drawing import draw
from terrine.federated.plan import AdaptiveClipping, Plan
from terrine.federated.quantise import Floats, Quantiser
from terrine.federated.sampling import MinimumSeparation, PoissonClients
from terrine.federated.secure import keeping, keys
from terrine.federated.secure.client import Client
from terrine.federated.secure.keys import Identity
from terrine.federated.secure.opening import contribution
from terrine.federated.secure.rounds import Round
from terrine.federated.secure.server import Server, TooFewSurvivors
from terrine.federated.sums import Central
from terrine.receipts import Charged
from terrine.rng import SYSTEM, Seeded, Source

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as error:
    raise MissingExtra("flwr", extra="federated") from error

_LOG = logging.getLogger("terrine.federated")
RECORD = "terrine"
_FAILED = 0
_WAIT = 1.0

Next = Callable[[Message, Context], Message]


def private_mod(plan: Plan, *, identities: Mapping[int, bytes] | None = None) -> Callable[..., Message]:
    """A mod that answers the secure sum's questions, and lets the app train for one of them.

    `identities` are the clients' Ed25519 keys by node id, from elsewhere than the server. Without them a client
    believes the first key it is told for a node, which is enough against a server that follows the protocol.

    Raises:
        InvalidArgument: the plan's sums are not made of shares.
    """
    _demand_shares(plan)

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        if RECORD not in message.content.config_records:
            reason = "terrine: a message outside of the private protocol; want SecureSumStrategy on the server"
            return Message(Error(code=_FAILED, reason=reason), reply_to=message)
        try:
            content = _Answering(plan, identities, message, context).answer(call_next)
        except TerrineError as refusal:
            return Message(Error(code=_FAILED, reason=f"terrine: {refusal}"), reply_to=message)
        except Exception as error:  # of a message that is none of the protocol's; Flower would tell the server its text
            _LOG.exception("a message could not be answered")
            reason = f"terrine: a message that cannot be answered ({type(error).__name__})"
            return Message(Error(code=_FAILED, reason=reason), reply_to=message)
        return Message(content, reply_to=message)

    return mod


class _Answering:
    """One client and one message."""

    def __init__(self, plan: Plan, identities: Mapping[int, bytes] | None, message: Message, context: Context) -> None:
        self._plan, self._identities, self._message, self._context = plan, identities, message, context
        asked = message.content.config_records[RECORD]
        self._stage, self._told = str(asked["stage"]), json.loads(str(asked["told"]))
        self._rng: Source = SYSTEM if plan.seed is None else Seeded(plan.seed + context.node_id % 2**32)

    def answer(self, call_next: Next) -> RecordDict:
        if self._stage == "advertise":
            self._keep("round", keeping.dump(self._told))
        told = json.loads(self._kept("round"))
        round_ = keeping.round_from_dict(told["round"])
        self._check(round_, told)
        client = Client(told["index"], round_, self._identity(), self._known(told), rng=self._rng)
        if self._stage != "advertise":
            client.restore(self._kept("client"))
        said, vector = self._said(client, told, call_next)
        self._keep("client", client.kept())
        content = RecordDict({RECORD: ConfigRecord({"said": keeping.dump(said)})})
        if vector is not None:
            content["masked"] = ArrayRecord({"masked": Array(vector)})
        return content

    def _said(self, client: Client, told: dict[str, Any], call_next: Next) -> tuple[dict[str, Any], Any]:
        match self._stage:
            case "advertise":
                return keeping.keys_to_dict(client.advertise()) | {"identity": self._identity().public.hex()}, None
            case "share":
                found = client.share(keeping.keys_from_dict(one) for one in self._told["keys"])
                return keeping.hexed(found), None
            case "mask":
                values = contribution(
                    self._update(told, call_next), _quantiser(self._plan, told), self._plan,
                    gives=client.index in client.round.givers, rng=self._rng,
                )  # fmt: skip
                return {}, client.mask(values, keeping.unhexed(self._told["sealed"]))
            case "agree":
                return {"signature": client.agree(self._told["survivors"]).hex()}, None
            case "unmask":
                signatures = keeping.unhexed(self._told["signatures"])
                return keeping.unmasking_to_dict(client.unmask(self._told["survivors"], signatures)), None
            case _:
                raise InvalidArgument(f"stage={self._stage!r}: want one of the secure sum's")

    def _update(self, told: dict[str, Any], call_next: Next) -> Floats:
        """What the app changed; zeros for a client that only stands in.

        Raises:
            InvalidArgument: it had all the turns that its own plan gives it, whatever the server says.
        """
        if not self._told["contributes"]:
            return np.zeros(told["dimension"])
        turns = int(self._kept("turns")) if "turns" in self._state else 0
        if turns >= self._plan.turns:
            raise InvalidArgument(f"{turns} turns are over, as many as the plan gives a client: nothing is sent")
        self._keep("turns", str(turns + 1))
        before = _flat(next(iter(self._message.content.array_records.values())))
        del self._message.content[RECORD]
        try:
            reply = call_next(self._message, self._context)
        except Exception:  # its text, which may quote rows, stays here; Flower would tell it to the server
            _LOG.exception("the app failed")
            raise InvalidArgument("the app failed: nothing is sent") from None
        if reply.has_error() or len(reply.content.array_records) != 1:
            raise InvalidArgument("the app returned no weights: nothing is sent")
        change = _flat(next(iter(reply.content.array_records.values()))) - before
        if isinstance(self._plan.clip, AdaptiveClipping):
            change = quantise.with_bit(change, told["bound"], self._plan.clip.weight)
        return quantise.checked(change, told["dimension"])

    def _check(self, round_: Round, told: dict[str, Any]) -> None:
        """The server's facts must be those of this client's own plan."""
        sums = self._plan.sums
        assert not isinstance(sums, Central)
        fits = round_.bits == sums.bits and round_.survivors >= sums.survivors and round_.degree is None
        fits = fits and round_.colluding == sums.colluding and len(round_.givers) == self._plan.per_round
        if not fits or round_.length != _quantiser(self._plan, told).length:
            raise InvalidArgument("the round is not of this client's plan: want the same plan on both sides")

    def _identity(self) -> Identity:
        if "identity" not in self._state:
            self._keep("identity", keys.secret(SYSTEM).hex())
        return Identity(bytes.fromhex(self._kept("identity")))

    def _known(self, told: dict[str, Any]) -> dict[int, bytes]:
        """Whose keys are believed, by index in the round."""
        nodes = {int(one["index"]): one for one in self._told.get("people", told.get("people", []))}
        if self._stage == "share":
            self._keep("round", keeping.dump(told | {"people": list(nodes.values())}))
        if self._identities is not None:
            return {index: self._identities[one["node"]] for index, one in nodes.items()}
        first: dict[str, str] = json.loads(self._kept("people")) if "people" in self._state else {}
        for one in nodes.values():
            first.setdefault(str(one["node"]), one["identity"])
        self._keep("people", keeping.dump(first))
        return {index: bytes.fromhex(first[str(one["node"])]) for index, one in nodes.items()}

    @property
    def _state(self) -> ConfigRecord:
        if RECORD not in self._context.state.config_records:
            self._context.state[RECORD] = ConfigRecord()
        return self._context.state.config_records[RECORD]

    def _keep(self, name: str, text: str) -> None:
        self._state[name] = text

    def _kept(self, name: str) -> str:
        if name not in self._state:
            raise OutOfOrder(f"{self._stage}: want advertise first")
        return str(self._state[name])


class SecureSumStrategy(Strategy):  # type: ignore[misc]
    """Federated averaging with masked whole numbers and noise inside.

    Guarantee: what it hands on after all rounds costs at most `plan.event`; the account is charged for every round
    (or, where rounds have no price of their own, for the plan) before any client is asked. `server` is an optimizer of
    `federated`, such as FedAvg or FedAdam.

    Raises:
        InvalidArgument: the plan's sums are not made of shares.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        account: Charged | None = None,
        server: Any = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        timeout: float = 600.0,
    ) -> None:
        _demand_shares(plan)
        self.plan, self.closed = plan, 0
        self._account, self._server, self._timeout = account, server, timeout
        self._array_key, self._config_key = arrayrecord_key, configrecord_key
        self._rng: Source = SYSTEM if plan.seed is None else Seeded(plan.seed)
        self._bound = plan.clip.initial if isinstance(plan.clip, AdaptiveClipping) else plan.clip
        self._rounds, self._turns = 0, dict[int, list[int]]()
        self._key = _key(plan)
        self._optimizer: Any = None
        self._weights: Any = None
        self._running: _Running | None = None

    def summary(self) -> None:
        """Say what will be done."""
        from flwr.common import log

        log(20, "	Terrine: epsilon %.4g at delta %g for one client", self.plan.epsilon, self.plan.delta)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Charge, draw, exchange keys and shares; then the messages that clients train for.

        Raises:
            InvalidArgument: another number of nodes than the plan's clients.
            OutOfOrder: the plan's rounds are over.
            BudgetExceeded: the account has not enough left; no client is asked.
        """
        if self._rounds >= self.plan.rounds:
            raise OutOfOrder(f"round {server_round}: the plan's {self.plan.rounds} rounds are over; want another plan")
        nodes = self._nodes(grid)
        if self._account is not None and (self.plan.by_round or self._rounds == 0):
            event = self.plan.round_event if self.plan.by_round else self.plan.event
            self._account.charge(event, purpose="federated learning", by="terrine.federated.flower")
        self._rounds += 1
        config["server-round"] = server_round
        running = _Running(self, grid, nodes, arrays)
        try:
            messages = running.begin(config)
        except TooFewSurvivors:
            self.closed += 1
            return []
        self._running = running
        return messages

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Open the round's sum, and take the server's step; nothing where too few survived."""
        running, self._running = self._running, None
        if running is None:
            return None, None
        try:
            total, survivors = running.finish(replies)
        except TooFewSurvivors:
            self.closed += 1
            return None, None
        mean = running.quantiser.to_real(total) / self.plan.per_round
        return self._stepped(mean, running.arrays), MetricRecord({"survivors": survivors})

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Nobody: what clients measure on their own data is private, and not paid for."""
        return []

    def aggregate_evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def _nodes(self, grid: Grid) -> list[int]:
        """All clients, once they are there."""
        until = time.monotonic() + self._timeout
        while len(nodes := sorted(grid.get_node_ids())) < self.plan.clients and time.monotonic() < until:
            time.sleep(_WAIT)
        if len(nodes) != self.plan.clients:
            raise InvalidArgument(f"{len(nodes)} nodes: want the plan's {self.plan.clients} clients; nothing was asked")
        return nodes

    def _stepped(self, mean: Floats, arrays: ArrayRecord) -> ArrayRecord:
        import torch

        from terrine.federated.learning import FedAvg

        if isinstance(self.plan.clip, AdaptiveClipping):
            share, mean = float(mean[-1]) / self.plan.clip.weight + 0.5, mean[:-1] * self._bound
            self._bound = self.plan.clip.following(self._bound, share)
        if self._weights is None:
            self._weights = torch.nn.Parameter(torch.from_numpy(_flat(arrays)))
            self._optimizer = (self._server or FedAvg()).optimizer([self._weights])
        self._weights.grad = -torch.from_numpy(mean)
        self._optimizer.step()
        return _shaped(self._weights.detach().numpy(), arrays)


class _Running:
    """One round on its way."""

    def __init__(self, strategy: SecureSumStrategy, grid: Grid, nodes: list[int], arrays: ArrayRecord) -> None:
        plan, rng = strategy.plan, strategy._rng
        assert not isinstance(plan.sums, Central)
        self._strategy, self._grid, self.arrays = strategy, grid, arrays
        drawn = draw(plan, rng, key=strategy._key, round_=strategy._rounds - 1, turns=strategy._turns)
        self._nodes = [nodes[one] for one in drawn.taking_part]
        self._contributing = {place for place, one in enumerate(drawn.taking_part) if one in drawn.contributing}
        dimension = _flat(arrays).size + isinstance(plan.clip, AdaptiveClipping)
        facts = {"dimension": dimension, "signs": rng.word() >> 1, "bound": strategy._bound}
        self.quantiser = _quantiser(plan, facts)
        self._round = Round(
            name=rng.words(4).tobytes(),
            clients=len(self._nodes),
            givers=frozenset(place for place, one in enumerate(drawn.taking_part) if one in drawn.giving),
            survivors=plan.sums.survivors,
            length=self.quantiser.length,
            bits=plan.sums.bits,
            seed=rng.word() >> 1,
            colluding=plan.sums.colluding,
        )
        self._facts = facts | {"round": keeping.round_to_dict(self._round)}
        self._server = Server(self._round)

    def begin(self, config: ConfigRecord) -> list[Message]:
        """Keys, then shares; then the messages that ask for masked vectors."""
        everyone = range(len(self._nodes))
        advertised = self._ask("advertise", {one: self._facts | {"index": one} for one in everyone})
        self._server.advertised(keeping.keys_from_dict(one) for one in advertised.values())
        people = [
            {"index": one, "node": self._nodes[one], "identity": said["identity"]} for one, said in advertised.items()
        ]
        told = {}
        for one in advertised:
            listed = [keeping.keys_to_dict(other) for other in self._server.keys_for(one)]
            told[one] = {"keys": listed, "people": people}
        shared = self._ask("share", told)
        self._server.shared({one: keeping.unhexed(said) for one, said in shared.items()})
        key, other = self._strategy._array_key, self._strategy._config_key
        return [
            self._message(
                "mask",
                one,
                {"sealed": keeping.hexed(self._server.shares_for(one)), "contributes": one in self._contributing},
                {key: self.arrays, other: config},
            )
            for one in shared
        ]

    def finish(self, replies: Iterable[Message]) -> tuple[Any, int]:
        """Masked vectors in, the noisy sum out, and how many shares of noise it holds."""
        places = {node: place for place, node in enumerate(self._nodes)}
        for reply in replies:
            if not reply.has_error() and "masked" in reply.content.array_records:
                with contextlib.suppress(Exception):  # whatever a client sends: it counts as dropped out
                    masked = reply.content.array_records["masked"]["masked"].numpy()
                    self._server.add(places[reply.metadata.src_node_id], masked.astype(np.uint32))
        survivors = self._server.survivors
        agreed = self._ask("agree", {one: {"survivors": survivors} for one in survivors})
        signatures = {str(one): said["signature"] for one, said in agreed.items()}
        told = {"survivors": survivors, "signatures": signatures}
        answers = self._ask("unmask", dict.fromkeys(agreed, told))
        total = self._server.open(keeping.unmasking_from_dict(one) for one in answers.values())
        return total, len(self._round.givers & set(survivors))

    def _ask(self, stage: str, told: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """What clients say to a question, by index; those who fail or fall silent are left out."""
        places = {node: place for place, node in enumerate(self._nodes)}
        messages = [self._message(stage, one, text, {}) for one, text in told.items()]
        found = {}
        for reply in self._grid.send_and_receive(messages, timeout=self._strategy._timeout):
            if not reply.has_error():
                with contextlib.suppress(Exception):  # whatever a client sends: who answers nonsense counts as silent
                    place = places[reply.metadata.src_node_id]
                    found[place] = _read(stage, json.loads(str(reply.content.config_records[RECORD]["said"])), place)
        return dict(sorted(found.items()))

    def _message(self, stage: str, one: int, told: dict[str, Any], records: dict[str, Any]) -> Message:
        asked = ConfigRecord({"stage": stage, "told": keeping.dump(told)})
        content = RecordDict({**records, RECORD: asked})
        return Message(content=content, message_type=MessageType.TRAIN, dst_node_id=self._nodes[one])


def _read(stage: str, said: dict[str, Any], place: int) -> dict[str, Any]:
    """An answer, of which all that will be read was read once.

    Raises:
        KeyError, ValueError, TypeError: it is none, or speaks for another client.
    """
    match stage:
        case "advertise":
            client = keeping.keys_from_dict(said).client
            bytes.fromhex(said["identity"])
        case "share":
            client, _ = place, keeping.unhexed(said)
        case "agree":
            client, _ = place, bytes.fromhex(said["signature"])
        case _:
            client = keeping.unmasking_from_dict(said).client
    if client != place:
        raise ValueError(f"client {place} speaks for {client}")
    return said


def _quantiser(plan: Plan, facts: dict[str, Any]) -> Quantiser:
    return Quantiser(facts["dimension"], plan.bound, plan.reach, facts["signs"])


def _key(plan: Plan) -> Any:
    """What groups and fixed orders of clients come from, where the plan has such."""
    if isinstance(plan.sampling, PoissonClients | MinimumSeparation):
        return None
    from terrine.common.keys import Key

    return Key.fresh() if plan.seed is None else Key.seeded(plan.seed)


def _demand_shares(plan: Plan) -> None:
    if isinstance(plan.sums, Central):
        raise InvalidArgument("plan.sums=Central(): want shares of noise, federated.Skellam or DiscreteGaussian")


def _flat(arrays: ArrayRecord) -> Floats:
    found: Floats = np.concatenate([one.astype(np.float64).ravel() for one in arrays.to_numpy_ndarrays()])
    return found


def _shaped(flat: Floats, like: ArrayRecord) -> ArrayRecord:
    found, at = {}, 0
    for name, one in like.items():
        before = one.numpy()
        found[name] = Array(flat[at : at + before.size].reshape(before.shape).astype(before.dtype))
        at += before.size
    return ArrayRecord(found)
