"""What every way of summing private vectors costs, measured here and now: `terrine sums`.

Each way adds up the same vectors of `parties` people, `length` numbers in [-1, 1] of l2 norm at most 1 each, in fixed
point. Times are seconds of a processor, so that a busy machine does not change them: of one client (the mean over some)
and of all servers together; bytes are what one client sends. What a way protects is not the same: encryption and masks
hide inputs from servers, and the result tells what it tells; noise protects the people in the result, and hides inputs
only where it is added before they are sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import MissingExtra
from terrine.federated.secure import Client, Identity, Round, Server, keys
from terrine.federated.sums import DiscreteGaussian
from terrine.mechanisms import gaussian, lattice
from terrine.rng import SYSTEM

Integers = NDArray[np.int64]

EPSILON, DELTA = 1.0, 1e-5
"""Of those ways that add noise."""
LECTURE = {"noise": 1.0, "secret sharing": 100.0, "homomorphic encryption": (10.0, 10_000.0)}
"""Factors that the source lectures state, relative to noise."""
_FIELD = (1 << 31) - 1
_SERVERS, _HOLDERS, _THRESHOLD = 3, 5, 3
_PAILLIER_BITS = 2048


@dataclass(frozen=True)
class SummingCost:
    """One way of summing, measured; `skipped` says why it was not."""

    way: str
    kind: str
    client_ms: float | None = None
    server_ms: float | None = None
    bytes: int | None = None
    dropouts: str = ""
    trusted: str = ""
    protects: str = ""
    error: float | None = None
    """Root mean square error of an entry of the sum."""
    skipped: str | None = None


@dataclass
class Task:
    """Vectors to sum, and clocks for whoever works on them."""

    parties: int
    length: int
    clients: float = 0.0
    servers: float = 0.0
    timed: int = 0
    values: Integers = field(init=False)
    unit: float = field(init=False)

    def __post_init__(self) -> None:
        self.parties = check.whole("parties", self.parties, at_least=3)
        self.length = check.whole("length", self.length)
        drawn = np.random.default_rng(0).normal(size=(self.parties, self.length))
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        self.unit = 2.0 ** math.floor(math.log2(400_000 / self.parties))  # so that sums have less than 20 bits
        self.values = np.rint(drawn * self.unit).astype(np.int64)
        self._exact = drawn.sum(axis=0)

    def error(self, total: NDArray[Any]) -> float:
        """How far a sum in grid steps is off."""
        return float(np.sqrt(np.mean((np.asarray(total, dtype=float) / self.unit - self._exact) ** 2)))

    @contextmanager
    def client(self, count: int = 1) -> Iterator[None]:
        """Time of `count` clients."""
        begin = time.process_time()
        yield
        self.clients += time.process_time() - begin
        self.timed += count

    @contextmanager
    def server(self) -> Iterator[None]:
        """Time of the servers."""
        begin = time.process_time()
        yield
        self.servers += time.process_time() - begin

    def cost(self, way: str, kind: str, size: int, total: NDArray[Any], **said: str) -> SummingCost:
        """What was measured."""
        each = 1e3 * self.clients / max(self.timed, 1)
        return SummingCost(way, kind, each, 1e3 * self.servers, size, error=self.error(total), **said)


def compare(parties: int = 100, length: int = 1000) -> list[SummingCost]:
    """Every way, one after the other; those whose packages are not installed are listed as skipped."""
    found = []
    for name, (kind, way) in WAYS.items():
        try:
            found.append(way(Task(parties, length)))
        except MissingExtra as missing:
            found.append(SummingCost(name, kind, skipped=str(missing)))
    return found


def record(parties: int, length: int, found: list[SummingCost]) -> dict[str, Any]:
    """The comparison as JSON holds it, with factors relative to noise at a trusted server."""
    base = _whole(found[0])
    rows = [asdict(one) | {"times_noise": None if one.skipped else _whole(one) / base} for one in found]
    return {"parties": parties, "length": length, "epsilon": EPSILON, "delta": DELTA, "lecture": LECTURE, "rows": rows}


def _whole(cost: SummingCost) -> float:
    assert cost.client_ms is not None
    assert cost.server_ms is not None
    return cost.client_ms + cost.server_ms


def _deviation(task: Task) -> float:
    return gaussian.noise_for(EPSILON, DELTA) * task.unit


def _noise_at_the_server(task: Task) -> SummingCost:
    noise = lattice.noise(lattice.Shape.GAUSSIAN, _deviation(task))
    with task.client(task.parties):
        sent = [one.astype(np.int32) for one in task.values]
    noise.sample(task.length, SYSTEM)  # once beforehand: the first draw of a process is slower
    with task.server():
        total = np.asarray(np.sum(sent, axis=0, dtype=np.int64) + noise.sample(task.length, SYSTEM))
    said = {"dropouts": "any", "trusted": "the server, with every input", "protects": "people in the result"}
    return task.cost("noise at a trusted server", "noise", 4 * task.length, total, **said)


def _local_noise(task: Task) -> SummingCost:
    noise = lattice.noise(lattice.Shape.GAUSSIAN, 2 * _deviation(task))  # one input for another: twice the norm
    sent = []
    for one in task.values:
        with task.client():
            sent.append((one + noise.sample(task.length, SYSTEM)).astype(np.int32))
    with task.server():
        total = np.asarray(np.sum(sent, axis=0, dtype=np.int64))
    said = {"dropouts": "any", "trusted": "nobody", "protects": "inputs and people in the result"}
    return task.cost("local noise", "noise", 4 * task.length, total, **said)


def _masked(task: Task, *, neighbours: int | None, noisy: bool) -> tuple[Integers, int]:
    """The secure sum of this package; returns the sum and what one client sends."""
    bits = 24 if noisy else 20
    sums = DiscreteGaussian(bits=bits, survivors=task.parties)
    everyone = frozenset(range(task.parties))
    round_ = Round(keys.secret(SYSTEM), task.parties, everyone, task.parties * 2 // 3, task.length, bits, 0, neighbours)
    identities = [Identity(keys.secret(SYSTEM)) for _ in everyone]
    known = {index: one.public for index, one in enumerate(identities)}
    server, sent, advertised, sealed = Server(round_), 0, [], {}
    with task.client(task.parties):
        clients = [Client(index, round_, one, known) for index, one in enumerate(identities)]
        advertised = [one.advertise() for one in clients]
    with task.server():
        server.advertised(advertised)
    for one in clients:
        received = server.keys_for(one.index)
        with task.client(0):
            sealed[one.index] = one.share(received)
    server.shared(sealed)
    for one, values in zip(clients, task.values, strict=True):
        received_shares = server.shares_for(one.index)
        with task.client(0):
            noise = sums.share(task.length, _deviation(task), SYSTEM) if noisy else 0
            masked = one.mask(values + noise, received_shares)
        with task.server():
            server.add(one.index, masked)
    survivors = server.survivors
    with task.client(0):
        signatures = {one.index: one.agree(survivors) for one in clients}
        answers = [one.unmask(survivors, signatures) for one in clients]
    with task.server():
        total = server.open(answers)
    sent = 96 + sum(map(len, sealed[0].values())) + 4 * task.length + 64 + 33 * len(answers[0].own)
    return total, sent


def _pairwise(task: Task) -> SummingCost:
    total, sent = _masked(task, neighbours=task.parties - 1, noisy=False)
    said = {"dropouts": "a third", "trusted": "the server to follow the protocol", "protects": "inputs"}
    return task.cost("pairwise masks", "masks", sent, total, **said)


def _pairwise_with_neighbours(task: Task) -> SummingCost:
    total, sent = _masked(task, neighbours=10, noisy=False)
    said = {"dropouts": "a few", "trusted": "the server to follow the protocol", "protects": "inputs"}
    return task.cost("pairwise masks, 10 neighbours", "masks", sent, total, **said)


def _distributed(task: Task) -> SummingCost:
    total, sent = _masked(task, neighbours=10, noisy=True)
    said = {"trusted": "the server to follow the protocol", "protects": "inputs and people in the result"}
    return task.cost("distributed noise under masks", "noise", sent, total, dropouts="as sized", **said)


def _additive(task: Task) -> SummingCost:
    shares: list[list[NDArray[np.uint32]]] = [[] for _ in range(_SERVERS)]
    for one in task.values:
        with task.client():
            random = [SYSTEM.words(-(-task.length // 2)).view(np.uint32)[: task.length] for _ in range(_SERVERS - 1)]
            last = (one & 0xFFFFFFFF).astype(np.uint32)
            for part in random:
                last = last - part
        for held, part in zip(shares, [*random, last], strict=True):
            held.append(part)
    with task.server():
        sums = [np.sum(held, axis=0, dtype=np.uint32) for held in shares]
        total = np.asarray(np.sum(sums, axis=0, dtype=np.uint32)).view(np.int32)
    said = {"dropouts": "any client, no server", "trusted": "one server of three", "protects": "inputs"}
    return task.cost("additive shares, 3 servers", "secret sharing", 4 * _SERVERS * task.length, total, **said)


def _shamir(task: Task) -> SummingCost:
    held: list[list[NDArray[np.uint64]]] = [[] for _ in range(_HOLDERS)]
    for one in task.values:
        with task.client():
            coefficients = [_field(task.length) for _ in range(_THRESHOLD - 1)]
            secret = (one % _FIELD).astype(np.uint64)
            shares = [_value(secret, coefficients, point) for point in range(1, _HOLDERS + 1)]
        for place, share in zip(held, shares, strict=True):
            place.append(share)
    with task.server():
        sums = [np.sum(place, axis=0) % _FIELD for place in held[:_THRESHOLD]]
        total = np.zeros(task.length, dtype=np.int64)
        for point, share in enumerate(sums, start=1):
            total = (total + share.astype(np.int64) * _weight(point)) % _FIELD
        total = np.where(total > _FIELD // 2, total - _FIELD, total)
    said = {"dropouts": "2 of 5 servers, any client", "trusted": "no 3 servers of 5 to collude", "protects": "inputs"}
    return task.cost("Shamir, 3 of 5 servers", "secret sharing", 4 * _HOLDERS * task.length, total, **said)


def _field(count: int) -> NDArray[np.uint64]:
    drawn = SYSTEM.words(count) >> np.uint64(33)
    while (over := np.flatnonzero(drawn == _FIELD)).size:
        drawn[over] = SYSTEM.words(over.size) >> np.uint64(33)
    return drawn


def _value(secret: NDArray[np.uint64], coefficients: list[NDArray[np.uint64]], point: int) -> NDArray[np.uint64]:
    value = np.zeros_like(secret)
    for coefficient in coefficients:
        value = (value + coefficient) * np.uint64(point) % np.uint64(_FIELD)
    return (value + secret) % np.uint64(_FIELD)


def _weight(point: int) -> int:
    over = under = 1
    for other in range(1, _THRESHOLD + 1):
        if other != point:
            over, under = over * other % _FIELD, under * (other - point) % _FIELD
    return over * pow(under, -1, _FIELD) % _FIELD


def _paillier(task: Task) -> SummingCost:
    """Packed: as many entries to a ciphertext as its 2048 bits hold. One client is timed; the sum is of all."""
    phe = _module("phe", "phe")
    public, private = phe.generate_paillier_keypair(n_length=_PAILLIER_BITS)
    slot = 21 + math.ceil(math.log2(task.parties))
    each, offset = (_PAILLIER_BITS - 8) // slot, 1 << 20
    packed = [_packed(one + offset, each, slot) for one in task.values]
    with task.client():
        first = [public.encrypt(plain, precision=None) for plain in packed[0]]
    rest = [[public.encrypt(plain, r_value=1) for plain in one] for one in packed[1:]]  # as long, and quickly made
    with task.server():
        totals = [sum(column[1:], start=column[0]) for column in zip(first, *rest, strict=True)]
        plains = [private.decrypt(one) for one in totals]
    total = _unpacked(plains, each, slot, task.length) - offset * task.parties
    size = len(first) * 2 * _PAILLIER_BITS // 8
    said = {"dropouts": "any", "trusted": "whoever holds the key", "protects": "inputs"}
    return task.cost("Paillier, packed", "homomorphic encryption", size, total, **said)


def _packed(values: Integers, each: int, slot: int) -> list[int]:
    parts = [values[begin : begin + each].tolist() for begin in range(0, len(values), each)]
    return [sum(value << (slot * place) for place, value in enumerate(part)) for part in parts]


def _unpacked(plains: list[int], each: int, slot: int, length: int) -> Integers:
    mask = (1 << slot) - 1
    found = [plain >> (slot * place) & mask for plain in plains for place in range(each)]
    return np.array(found[:length], dtype=np.int64)


def _bfv(task: Task) -> SummingCost:
    tenseal = _module("tenseal", "tenseal")
    context = tenseal.context(tenseal.SCHEME_TYPE.BFV, poly_modulus_degree=8192, plain_modulus=1032193)
    return _encrypted(task, "BFV", lambda row: tenseal.bfv_vector(context, row.tolist()))


def _ckks(task: Task) -> SummingCost:
    tenseal = _module("tenseal", "tenseal")
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40, 60])
    context.global_scale = 2**40
    return _encrypted(task, "CKKS", lambda row: tenseal.ckks_vector(context, row.astype(float).tolist()))


def _encrypted(task: Task, name: str, encrypt: Callable[[Integers], Any]) -> SummingCost:
    sent = []
    for one in task.values:
        with task.client():
            sent.append([encrypt(part) for part in np.array_split(one, -(-task.length // 4096))])
    size = sum(len(part.serialize()) for part in sent[0])
    with task.server():
        total = []
        for column in zip(*sent, strict=True):
            whole = column[0]
            for part in column[1:]:
                whole += part
            total += whole.decrypt()
    said = {"dropouts": "any", "trusted": "whoever holds the key", "protects": "inputs"}
    return task.cost(f"{name} (TenSEAL)", "homomorphic encryption", size, np.array(total), **said)


def _module(name: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(package, extra="crypto") from error


WAYS: dict[str, tuple[str, Callable[[Task], SummingCost]]] = {
    "noise at a trusted server": ("noise", _noise_at_the_server),
    "local noise": ("noise", _local_noise),
    "distributed noise under masks": ("noise", _distributed),
    "pairwise masks": ("masks", _pairwise),
    "pairwise masks, 10 neighbours": ("masks", _pairwise_with_neighbours),
    "additive shares, 3 servers": ("secret sharing", _additive),
    "Shamir, 3 of 5 servers": ("secret sharing", _shamir),
    "Paillier, packed": ("homomorphic encryption", _paillier),
    "BFV (TenSEAL)": ("homomorphic encryption", _bfv),
    "CKKS (TenSEAL)": ("homomorphic encryption", _ckks),
}
