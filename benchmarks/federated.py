"""Federated learning: how good are models by each way of summing, and what does the protocol cost?

    python benchmarks/federated.py accuracy [--ways central skellam] [--epsilons 2 4 8] [--seeds 3] [--two-classes]
    python benchmarks/federated.py cost [--sizes 100000 1000000 10000000] [--clients 20] [--repeats 3]
    python benchmarks/federated.py growth [--counts 10 30 100 300 1000]

accuracy    See benchmarks/federated_accuracy.py.
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
from rich.console import Console
from rich.table import Table

import federated_accuracy
from terrine import federated
from terrine.federated import secure
from terrine.federated.quantise import Quantiser
from terrine.federated.secure import keys
from terrine.federated.secure.opening import contribution
from terrine.rng import SYSTEM

KEPT = Path(__file__).parent / "results" / "federated"


# -- what the protocol costs -------------------------------------------------------------------------------------------


def cost(arguments: argparse.Namespace) -> None:
    """Ways take turns, so that none has the machine at a better time; of each the median."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(arguments.repeats):
        for size in arguments.sizes:
            found.setdefault(("Flower SecAgg+", size), []).append(flower(size, arguments.clients - 1))
            for dropping in (0.0, 0.1, 0.3):
                several = found.setdefault((f"discrete Gaussian, {dropping:.0%} drop", size), [])
                several.append(ours(size, arguments.clients, dropping, federated.DiscreteGaussian))
            several = found.setdefault(("Skellam, 0% drop", size), [])
            several.append(ours(size, arguments.clients, 0.0, federated.Skellam))
    rows = [{"what": what, "size": size, "repeats": len(several), **_median(several)}
            for (what, size), several in found.items()]  # fmt: skip
    table = Table("way", "entries", "client s", "of it noise s", "of it rounding s", "server s", "MB sent", "seed bits")
    for one in rows:
        parts = ["" if one.get(name) is None else f"{one[name]:.3f}" for name in ("noise_s", "rounding_s", "server_s")]
        table.add_row(one["what"], f"{one['size']:,}", f"{one['client_s']:.3f}", *parts, f"{one['bytes'] / 1e6:.2f}",
                      str(one["seed_bits"]))  # fmt: skip
    Console().print(table)
    keep(arguments, "cost", rows)


def _median(several: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: float(np.median([one[name] for one in several])) for name in several[0]}


def ours(size: int, clients: int, dropping: float, kind: Any) -> dict[str, Any]:
    """One round of `clients`; a client's seconds are the mean over those timed."""
    gone = round(dropping * clients)
    plan = federated.Plan(
        clients=clients, per_round=clients, rounds=1, clip=1.0, noise=1.0, delta=1e-5, dimension=size,
        sums=kind(bits=20, survivors=clients - max(gone, 1)),
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
    vector = np.random.default_rng(0).normal(size=size)
    masking, noising, rounding, adding = 0.0, 0.0, 0.0, 0.0
    plan.sums.share(64, plan.deviation, SYSTEM)  # its public table is made once
    alive = members[gone:]
    for place, one in enumerate(alive):
        begin = time.process_time()
        if place < 2:  # two real contributions are timed; the others' numbers cost the server the same
            contribution(vector, quantiser, plan, gives=False, rng=SYSTEM)
            rounding += (between := time.process_time() - begin) / 2
            begin = time.process_time()
            values = contribution(vector, quantiser, plan, gives=True, rng=SYSTEM)
            noising += (time.process_time() - begin - between) / 2
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
        "client_s": keying + masking + rounding + noising, "noise_s": noising, "rounding_s": rounding,
        "masks_s": keying + masking,
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
    rows = [
        {"clients": count, **ours(arguments.size, count, 0.1, federated.DiscreteGaussian)} for count in arguments.counts
    ]
    table = Table("clients", "neighbours", "client s", "server s", title=f"{arguments.size:,} entries, 10% dropouts")
    for one in rows:
        table.add_row(str(one["clients"]), str(one["neighbours"]), f"{one['client_s']:.3f}", f"{one['server_s']:.3f}")
    Console().print(table)
    keep(arguments, "growth", rows)


def keep(arguments: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> None:
    path = Path(arguments.json) if arguments.json else KEPT / f"{name}.json"
    size = {one.get("size") for one in rows}
    before = json.loads(path.read_text()) if path.exists() and name == "cost" else []
    path.write_text(json.dumps([one for one in before if one["size"] not in size] + rows, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    federated_accuracy.arguments(commands.add_parser("accuracy"))
    two = commands.add_parser("cost")
    two.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    two.add_argument("--clients", type=int, default=20)
    two.add_argument("--repeats", type=int, default=3)
    two.set_defaults(run=cost)
    three = commands.add_parser("growth")
    three.add_argument("--counts", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    three.add_argument("--size", type=int, default=10_000)
    three.set_defaults(run=growth)
    for each in (two, three):
        each.add_argument("--json")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
