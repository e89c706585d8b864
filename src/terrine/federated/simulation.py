"""`terrine federated simulate`: a named data set cut into clients, trained by a plan, into a folder like any run's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import __version__, accounting, check, files
from terrine.audit import attacks
from terrine.audit import folder as audit_files
from terrine.errors import InvalidArgument
from terrine.events import Budget, is_reproducible, settled_neighbours, settled_unit
from terrine.events.codec import to_dict
from terrine.federated.learning import FedAdam, FedAvg, Federation, Local, RoundHistory
from terrine.federated.plan import AdaptiveClipping, Plan
from terrine.federated.sums import Central, DiscreteGaussian, Skellam
from terrine.pipeline import baseline, coins, pages, trained
from terrine.pipeline.folder import EVENTS, PRIVACY, RECEIPT, RESULTS, WEIGHTS, Folder
from terrine.pipeline.material import Material, open_data
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import SETS, Settings
from terrine.receipts import Charged, Payment, Receipt, finish, paid
from terrine.sgd.checkpoint import Checkpoint
from terrine.verify import manifest

SUMS = ("skellam", "discrete-gaussian", "central")
SERVERS = ("fedavg", "fedadam")
CHECKPOINT = "owner/federation.pt"


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """What was asked for: public choices, as the run's folder keeps them.

    Raises:
        InvalidArgument: a value is out of range, or two contradict each other.
    """

    data: str
    clients: int
    rounds: int
    epsilon: float
    command: str = "terrine federated simulate"
    per_round: int | None = None
    delta: float | None = None
    clip: float = 1.0
    adaptive_clip: bool = False
    sums: str = "skellam"
    bits: int = 20
    survivors: int | None = None
    colluding: int = 0
    dropping: float = 0.0
    model: str | None = None
    local_epochs: int = 3
    learning_rate: float | None = None
    server: str = "fedavg"
    server_learning_rate: float | None = None
    classes_per_client: int | None = None
    audit: int | None = None
    quick: bool = False
    """Add whole numbers up directly instead of by every message of the protocol: the same distribution."""
    weak_guarantee: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("data", SETS[:-1]), ("sums", SUMS), ("server", SERVERS)):
            if getattr(self, name) not in known:
                raise check.refuse(name, getattr(self, name), f"one of {', '.join(known)}")
        check.whole("clients", self.clients, at_least=2)
        check.whole("local_epochs", self.local_epochs)
        for name in ("per_round", "survivors"):
            if getattr(self, name) is not None:
                check.whole(name, getattr(self, name))
        for name in ("learning_rate", "server_learning_rate"):
            if getattr(self, name) is not None:
                check.positive(name, getattr(self, name))
        if self.delta is not None:
            check.open_unit("delta", self.delta)
        check.half_open_unit("dropping", self.dropping)
        if self.classes_per_client is not None:
            check.whole("classes_per_client", self.classes_per_client)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """The fields in which a kept run differs from these settings."""
        mine = self.as_dict()
        usual = {one.name: one.default for one in dataclasses.fields(self)}  # of runs from before there was a choice
        return [name for name in mine if mine[name] != other.get(name, usual[name])]

    def plan(self, dimension: int | None = None) -> Plan:
        """The plan of the run.

        Raises:
            InvalidArgument: it cannot be, or it would mean little and that was not asked for.
        """
        delta = self.delta or 10.0 ** -(math.floor(math.log10(self.clients)) + 1)
        weak = check.weakness(self.epsilon, delta, units=self.clients)
        if weak and not self.weak_guarantee:
            raise InvalidArgument(
                f"{weak}; want epsilon at most {check.LARGEST_EPSILON:g} and delta below 1/clients, or --weak-guarantee"
            )
        per_round = self.per_round or min(self.clients, max(10, self.clients // 5))
        return Plan(
            clients=self.clients, per_round=per_round, rounds=self.rounds,
            clip=AdaptiveClipping(initial=self.clip) if self.adaptive_clip else self.clip,
            budget=Budget(self.epsilon, delta), sums=self._sums(per_round), dimension=dimension, seed=self.seed,
        )  # fmt: skip

    def _sums(self, per_round: int) -> Central | Skellam | DiscreteGaussian:
        if self.sums == "central":
            return Central()
        kind = Skellam if self.sums == "skellam" else DiscreteGaussian
        survivors = self.survivors or max(2, math.ceil(0.8 * per_round))
        return kind(bits=self.bits, survivors=survivors, colluding=self.colluding)


def simulate(
    settings: SimulationSettings,
    out: str | Path,
    *,
    account: Charged | None = None,
    purpose: str = "terrine federated simulate",
    by: str = "terrine.federated",
    head: Callable[[], str] | None = None,
    after: Callable[[int], Any] = lambda _: None,
) -> Folder:
    """Train as the settings say, into the folder `out`; a run that is over is left as it is, one that was killed goes
    on after the last round that it may have opened.

    Guarantee: the model and privacy.json cost at most the event in privacy.json, which the account is charged for
    before any client is drawn. The clients' data are a published set: accuracy, and that of a model without privacy,
    are measured on its test part.

    Raises:
        InvalidArgument: the folder holds another run, or a model without what it was made from: another model would be
            another release.
    """
    folder: Any = Folder(out)
    folder.check(settings)
    if folder.done:
        finish(folder.path / RECEIPT)
        return folder  # type: ignore[no-any-return]
    if folder.has(WEIGHTS) and not folder.has(CHECKPOINT):
        raise InvalidArgument(f"{out}: cut off after its model was written; another one costs again, in a new folder")
    opened = open_data(Settings(epsilon=settings.epsilon, data=settings.data))
    architecture = Architecture(settings.model or _model(settings.data), opened.shape, opened.classes)
    module = _built(architecture, settings.seed)
    plan = settings.plan(sum(one.numel() for one in module.parameters()) + settings.adaptive_clip)
    with files.unmade_if_refused(folder.owner):
        if not folder.has(RECEIPT):
            folder.make()
        payment = Payment(account, purpose, by, head)
        receipt = paid(folder.path / RECEIPT, plan.event, payment, settings=settings.as_dict())
    folder.begin(settings)
    _train(folder, settings, plan, opened.look({}), architecture, module, receipt, after, opened.fingerprint)
    finish(folder.path / RECEIPT)
    return folder  # type: ignore[no-any-return]


def cut(labels: NDArray[np.int64], clients: int, classes_each: int | None, seed: int = 0) -> list[NDArray[np.int64]]:
    """The rows of every client: at random, or, sorted by class, in `classes_each` pieces to a client. [MMRHA17]"""
    generator = np.random.default_rng(seed)
    if len(labels) < clients * (classes_each or 1):
        raise InvalidArgument(f"{len(labels)} rows for {clients} clients: want fewer clients, or more rows")
    order = generator.permutation(len(labels))
    if classes_each is None:
        return np.array_split(order, clients)
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], clients * classes_each)
    dealt = generator.permutation(len(pieces)).reshape(clients, classes_each)
    return [np.concatenate([pieces[piece] for piece in hand]) for hand in dealt]


def _train(
    folder: Folder,
    settings: SimulationSettings,
    plan: Plan,
    material: Material,
    architecture: Architecture,
    module: nn.Module,
    receipt: Receipt,
    after: Callable[[int], Any],
    fingerprint: str,
) -> None:
    receipt.covers(plan.event)
    features, labels = architecture.features(material.inputs), torch.from_numpy(material.labels)
    rows = cut(material.labels, plan.clients, settings.classes_per_client)
    clients = [(features[part], labels[part]) for part in rows]
    audited = plan.clients // 4 if settings.audit is None else settings.audit
    tossed = coins.tossed(
        folder.owner / "coins.npz", units=plan.clients, count=min(audited, plan.clients), seed=settings.seed
    )
    with torch.random.fork_rng(devices=[], enabled=settings.seed is not None):
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        federation = Federation(
            module, plan, clients, local=_local(settings, architecture), server=_server(settings),
            dropping=settings.dropping, full=not settings.quick, silent=[int(one) for one in tossed.out],
            checkpoint=folder.path / CHECKPOINT,
        )  # fmt: skip
        history = federation.fit(after=after)
    module.eval()
    trained.save(folder, architecture, module, material.classes, None)
    folder.write(PRIVACY, claim(settings, plan, history, receipt, fingerprint))
    if len(tossed.units):
        scores = np.array([_score(module, *clients[int(one)]) for one in tossed.units])
        audit_files.write_canaries(folder.path, scores, tossed.heads)
    folder.write(RESULTS, _results(material, architecture, module, features))
    folder.write(EVENTS, folder.read(PRIVACY)["events"])
    pages.write_card(folder)
    manifest.write(folder.path)
    for path in (folder.path / CHECKPOINT, Checkpoint(folder.path / CHECKPOINT).count_path):
        path.unlink()


def claim(
    settings: SimulationSettings, plan: Plan, history: RoundHistory, receipt: Receipt, fingerprint: str
) -> dict[str, Any]:
    """What privacy.json says; `fingerprint` is that of the public facts about the inputs."""
    found = accounting.bounds(plan.event, delta=plan.delta)
    shared = plan.sums if not isinstance(plan.sums, Central) else None
    return {
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "epsilon_certified": {"lower": found.lower, "upper": min(found.upper, plan.epsilon)},
        "epsilon_for_insiders": plan.insider_epsilon,
        "dropouts": {str(one): [bounds.lower, bounds.upper] for one, bounds in plan.dropouts().items()},
        "weak_guarantee": check.weakness(settings.epsilon, plan.delta, units=plan.clients) or None,
        "unit": settled_unit(plan.event).value,
        "neighbours": settled_neighbours(plan.event).value,
        "method": "federated averaging",
        "sampler": "Poisson: every client is drawn for each round independently",
        "sums": settings.sums if shared is None else f"{settings.sums}, {shared.bits} bits, masked",
        "noise": plan.noise,
        "clip": settings.clip,
        "clients": plan.clients,
        "lot": plan.per_round,
        "rate": plan.rate,
        "steps": plan.rounds,
        "rounds_closed": history.closed,
        "rounds_lost": history.lost,
        "survivors": None if shared is None else shared.survivors,
        "colluding": None if shared is None else shared.colluding,
        "entries_wrapped_around": history.wrapped,
        "generator": "the operating system's" if plan.seed is None else "a seed, for tests only",
        "reproducible_noise_for_tests_only": is_reproducible(plan.event),
        "ledger": None if receipt.account is None else receipt.record(),
        "made": receipt.at[:10],
        "inputs_fingerprint": fingerprint,
        "public_facts": "the number of clients, the shape of inputs and the names of the classes count as public",
        "versions": {"terrine": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "events": {"terrine-events": 1, "event": to_dict(plan.event)},
    }


def _results(material: Material, architecture: Architecture, module: nn.Module, features: Tensor) -> dict[str, Any]:
    assert material.test is not None
    labels, tested = material.test[1], architecture.features(material.test[0])
    counts = np.bincount(labels, minlength=len(material.classes))
    plain = baseline.unsafe_train(architecture, features, material.labels)
    return {
        "data": material.name,
        "model": architecture.name,
        "classes": len(material.classes),
        "accuracy": _accuracy(module, tested, labels),
        "non_private": _accuracy(plain, tested, labels),
        "majority": float(counts.max() / counts.sum()),
        "parameters": sum(one.numel() for one in module.parameters()),
        "rows": len(labels),
        "measured_on": "the published test set, which needs no protection",
    }


def _accuracy(module: nn.Module, features: Tensor, labels: NDArray[np.int64]) -> float:
    with torch.no_grad():
        told = torch.cat([module(part).argmax(dim=1) for part in torch.split(features, 1000)]).numpy()
    return float((told == labels).mean())


def _score(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """How sure the module is of a client's labels: what the audit attacks."""
    with torch.no_grad():
        return float(np.mean(attacks.confidence(module(x).double().numpy(), y.numpy())))


def _local(settings: SimulationSettings, architecture: Architecture) -> Local:
    learning_rate = settings.learning_rate or (4.0 if architecture.name == "linear" else 0.1)
    return Local(
        lambda parameters: torch.optim.SGD(parameters, lr=learning_rate), epochs=settings.local_epochs, batch=50
    )


def _server(settings: SimulationSettings) -> FedAvg | FedAdam:
    if settings.server == "fedadam":
        return FedAdam(learning_rate=settings.server_learning_rate or 0.01)
    return FedAvg(learning_rate=settings.server_learning_rate or 1.0)


def _model(data: str) -> str:
    return "linear" if data == "digits" else "cnn"


def _built(architecture: Architecture, seed: int | None) -> nn.Module:
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return architecture.build()
