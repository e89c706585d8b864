"""Federated learning: how good are models by each way of summing, and what does the protocol cost?

    python benchmarks/federated.py accuracy [--rounds 100] [--epsilons 2 4 8] [--seeds 3] [--two-classes]
    python benchmarks/federated.py cost [--sizes 100000 1000000] [--clients 20]
    python benchmarks/federated.py growth [--clients 10 30 100 300]

accuracy    MNIST dealt to 1,000 clients, 50 of them expected in a round, the published CNN, two local epochs: without
            privacy, with central noise, Skellam and discrete Gaussian noise inside secure sums of 20 bits, and local
            DP (every client adds all of the noise that its own epsilon takes). Sums are added up without masks, which
            changes nothing but the time (tests/federated compares both ways). Results stay in benchmarks/results/
            federated; a picture goes to docs/pictures/federated.png.
cost        One client's and the server's seconds and bytes for a round, with 0, 10 and 30% dropouts; beside them the
            functions of Flower's SecAgg+ in the order in which its client mod calls them, with as many neighbours.
growth      The same for more clients.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from keeping import once
from terrine import datasets, federated
from terrine.events import Budget, Gaussian, Unit
from terrine.features.architectures import tempered_cnn
from terrine.federated import secure
from terrine.federated.quantise import Quantiser
from terrine.federated.secure import keys
from terrine.federated.secure.opening import contribution
from terrine.federated.simulation import cut
from terrine.mechanisms import gaussian
from terrine.rng import SYSTEM

KEPT = Path(__file__).parent / "results" / "federated"
CLIENTS, PER_ROUND, SURVIVORS, CLIP, DELTA = 1000, 50, 40, 0.5, 1e-4
WAYS = ("not private", "central", "skellam", "discrete gaussian", "local")


def accuracy(arguments: argparse.Namespace) -> None:
    found = datasets.mnist()
    data = [torch.from_numpy(one.copy()).float() / 255 for one in (found.train, found.test)]
    labels = torch.from_numpy(found.train_labels), torch.from_numpy(found.test_labels)
    rows = cut(found.train_labels, CLIENTS, 2 if arguments.two_classes else None)
    clients = [(data[0][part], labels[0][part]) for part in rows]
    records = []
    for way in arguments.ways:
        for epsilon in arguments.epsilons if way != "not private" else [0.0]:
            for seed in range(arguments.seeds):
                settings = {
                    "way": way, "epsilon": epsilon, "seed": seed, "rounds": arguments.rounds,
                    "two_classes": arguments.two_classes, "clients": CLIENTS, "per_round": PER_ROUND, "clip": CLIP,
                }  # fmt: skip
                name = "-".join(str(value).replace(" ", "_") for value in list(settings.values())[:5])
                path = KEPT / f"{name}.json"
                records.append(once(path, settings, lambda s=settings: run(s, clients, data[1], labels[1])))
                print(way, epsilon, seed, records[-1]["curve"][-1], flush=True)
    show(records)
    draw(records, Path("docs/pictures/federated.png"))


def run(settings: dict[str, Any], clients: list[Any], x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(settings["seed"])
    model = tempered_cnn()
    plan = plan_of(settings)
    curve: list[tuple[int, float]] = []

    def measure(done: int) -> None:
        if done % max(settings["rounds"] // 10, 1) == 0:
            with torch.no_grad():
                curve.append((done, float((model(x).argmax(dim=1) == y).float().mean())))

    local = federated.Local(lambda parameters: torch.optim.SGD(parameters, lr=0.1), epochs=2, batch=30)
    federation = federated.Federation(model, plan, clients, local=local, full=False)
    federation.fit(after=measure)
    private = settings["way"] != "not private"
    return {"curve": curve, "noise": plan.noise if private else None, "wrapped": federation.history.wrapped}


def plan_of(settings: dict[str, Any]) -> federated.Plan:
    """Without privacy: next to no noise. Local: the noise of one client's own Gaussian, `per_round` times over."""
    shared = {"clients": CLIENTS, "per_round": PER_ROUND, "rounds": settings["rounds"], "clip": CLIP}
    match settings["way"]:
        case "not private":
            return federated.Plan(**shared, noise=1e-6, delta=DELTA, sums=_Quiet())
        case "local":  # each round is a release by the client itself: no sampling hides it, one vector for another
            rounds = max(1, round(settings["rounds"] * PER_ROUND / CLIENTS))
            each = 2 * gaussian.noise_for(settings["epsilon"], DELTA) * np.sqrt(rounds)
            return federated.Plan(**shared, noise=each * np.sqrt(PER_ROUND), delta=DELTA)
        case "central":
            sums: Any = federated.Central()
        case "skellam":
            sums = federated.Skellam(bits=20, survivors=SURVIVORS)
        case _:
            sums = federated.DiscreteGaussian(bits=20, survivors=SURVIVORS)
    return federated.Plan(**shared, budget=Budget(settings["epsilon"], DELTA), sums=sums)


class _Quiet(federated.Central):
    """Central sums of a run that claims nothing."""

    def event(self, *_: Any) -> Any:
        return Gaussian(noise=1.0, unit=Unit.CLIENT)


def show(records: list[dict[str, Any]]) -> None:
    table = Table("way", "epsilon", "accuracy", "seeds", title="MNIST, 1,000 clients")
    groups: dict[tuple[str, float], list[float]] = {}
    for one in records:
        key = one["settings"]["way"], one["settings"]["epsilon"]
        groups.setdefault(key, []).append(one["curve"][-1][1])
    for (way, epsilon), values in groups.items():
        spread = f" +- {100 * np.std(values):.2f}" if len(values) > 1 else ""
        table.add_row(way, f"{epsilon:g}", f"{100 * np.mean(values):.2f}{spread}", str(len(values)))
    Console().print(table)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    epsilons = sorted({one["settings"]["epsilon"] for one in records} - {0.0})
    figure = Figure(figsize=(4 * len(epsilons), 3.4), layout="constrained")
    for place, epsilon in enumerate(epsilons):
        axes = figure.add_subplot(1, len(epsilons), place + 1)
        for way in WAYS:
            curves = [one["curve"] for one in records if one["settings"]["way"] == way
                      and one["settings"]["epsilon"] in (epsilon, 0.0)]  # fmt: skip
            if curves:
                mean = np.mean([[point[1] for point in curve] for curve in curves], axis=0)
                axes.plot([point[0] for point in curves[0]], mean, label=way)
        axes.set(title=f"epsilon {epsilon:g}", xlabel="rounds", ylabel="accuracy")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


# -- what the protocol costs -------------------------------------------------------------------------------------------


def cost(arguments: argparse.Namespace) -> None:
    rows = []
    for size in arguments.sizes:
        rows.append({"what": "Flower SecAgg+", "size": size, **flower(size, arguments.clients - 1)})
        for dropping in (0.0, 0.1, 0.3):
            found = ours(size, arguments.clients, dropping)
            rows.append({"what": f"Terrine, {dropping:.0%} drop", "size": size, **found})
    table = Table("way", "entries", "client s", "of it noise s", "server s", "MB sent", "bits of a mask's seed")
    for one in rows:
        noise, server = one.get("noise_s"), one.get("server_s")
        table.add_row(
            one["what"], f"{one['size']:,}", f"{one['client_s']:.3f}", "" if noise is None else f"{noise:.3f}",
            "" if server is None else f"{server:.3f}", f"{one['bytes'] / 1e6:.2f}", str(one["seed_bits"]),
        )  # fmt: skip
    Console().print(table)
    keep(arguments, "cost", rows)


def ours(size: int, clients: int, dropping: float) -> dict[str, Any]:
    """One round of `clients`; a client's seconds are the mean over those timed."""
    gone = round(dropping * clients)
    plan = federated.Plan(
        clients=clients, per_round=clients, rounds=1, clip=1.0, noise=1.0, delta=1e-5, dimension=size,
        sums=federated.DiscreteGaussian(bits=20, survivors=clients - max(gone, 1)),
    )  # fmt: skip
    quantiser = Quantiser(size, plan.bound, plan.reach, 1)
    everyone, fewest = frozenset(range(clients)), plan.sums.survivors
    round_ = secure.Round(keys.secret(SYSTEM), clients, everyone, fewest, quantiser.length, 20)
    identities = [secure.Identity(keys.secret(SYSTEM)) for _ in range(clients)]
    known = {index: one.public for index, one in enumerate(identities)}
    begin = time.process_time()
    members = [secure.Client(index, round_, one, known) for index, one in enumerate(identities)]
    server = secure.Server(round_)
    server.advertised([one.advertise() for one in members])
    sealed = {one.index: one.share(server.keys_for(one.index)) for one in members}
    keying = (time.process_time() - begin) / clients
    server.shared(sealed)
    vector, masking, noising, adding = np.random.default_rng(0).normal(size=size), 0.0, 0.0, 0.0
    alive = members[gone:]
    for place, one in enumerate(alive):
        begin = time.process_time()
        if place < 2:  # two real contributions are timed; the others' numbers cost the server the same
            values = contribution(vector, quantiser, plan, gives=True, rng=SYSTEM)
            noising += (time.process_time() - begin) / 2
            begin = time.process_time()
        masked = one.mask(values, server.shares_for(one.index))
        masking += (time.process_time() - begin) / len(alive)
        begin = time.process_time()
        server.add(one.index, masked)
        adding += time.process_time() - begin
    begin = time.process_time()
    signatures = {one.index: one.agree(server.survivors) for one in alive}
    answers = [one.unmask(server.survivors, signatures) for one in alive]
    keying += (time.process_time() - begin) / len(alive)
    begin = time.process_time()
    server.open(answers)
    opening = time.process_time() - begin
    return {
        "client_s": keying + masking + noising, "noise_s": noising, "masks_s": keying + masking,
        "server_s": adding + opening, "bytes": 4 * quantiser.length + 180 * clients, "seed_bits": 256,
        "neighbours": len(round_.neighbours(0)),
    }  # fmt: skip


def flower(size: int, neighbours: int) -> dict[str, Any]:
    """Flower's SecAgg+ client, step by step as its mod does it: keys, shares, quantising, masks."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes

    others = [generate_key_pairs() for _ in range(neighbours)]
    vector = [np.random.default_rng(0).normal(size=size).astype(np.float32)]
    begin = time.process_time()
    first, _ = generate_key_pairs()
    second, _ = generate_key_pairs()
    seed = np.random.bytes(32)
    for secret in (seed, private_key_to_bytes(first)):
        create_shares(secret, neighbours // 2 + 1, neighbours)
    shared = []
    for _, public in others:
        key = generate_shared_key(second, public)
        encrypt(key, bytes(96))
        shared.append(generate_shared_key(first, public))
    total = quantize(vector, 8.0, 1 << 20)
    shapes = [one.shape for one in total]
    total = parameters_addition(total, pseudo_rand_gen(seed, 1 << 24, shapes))
    for place, key in enumerate(shared):
        mask = pseudo_rand_gen(key, 1 << 24, shapes)
        total = parameters_addition(total, mask) if place % 2 else parameters_subtraction(total, mask)
    total = parameters_mod(total, 1 << 24)
    spent = time.process_time() - begin
    return {"client_s": spent, "bytes": total[0].nbytes + 200 * neighbours, "seed_bits": 32, "neighbours": neighbours}


def growth(arguments: argparse.Namespace) -> None:
    rows = [{"clients": count, **ours(arguments.size, count, 0.1)} for count in arguments.counts]
    table = Table("clients", "neighbours", "client s", "server s", title=f"{arguments.size:,} entries, 10% dropouts")
    for one in rows:
        table.add_row(str(one["clients"]), str(one["neighbours"]), f"{one['client_s']:.3f}", f"{one['server_s']:.3f}")
    Console().print(table)
    keep(arguments, "growth", rows)


def keep(arguments: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> None:
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({name: rows}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("accuracy")
    one.add_argument("--rounds", type=int, default=100)
    one.add_argument("--epsilons", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    one.add_argument("--seeds", type=int, default=3)
    one.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    one.add_argument("--two-classes", action="store_true")
    one.set_defaults(run=accuracy)
    two = commands.add_parser("cost")
    two.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    two.add_argument("--clients", type=int, default=20)
    two.set_defaults(run=cost)
    three = commands.add_parser("growth")
    three.add_argument("--counts", type=int, nargs="+", default=[10, 30, 100, 300])
    three.add_argument("--size", type=int, default=10_000)
    three.set_defaults(run=growth)
    for each in (two, three):
        each.add_argument("--json")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
