"""How good are models by each way of summing? `python benchmarks/federated.py accuracy`

MNIST dealt to 1,000 clients, at random or (--two-classes) two classes to each; 60 rounds of 50 clients expected; a CNN
of 6,346 weights; a client takes three local steps on 10 of its rows each, and its update is clipped to 0.5. All clients
of a round train at once, by `torch.func.vmap`.

    not private         next to no noise, the same clipping
    central             a trusted server's Gaussian noise, clients drawn by Poisson sampling
    skellam, discrete gaussian   noise in shares, for 40 survivors of 50, inside sums of 20 bits
    fixed order         a trusted server that cannot sample: every client once in 20 rounds, independent noise
    correlated          the same with noise correlated by 20 bands
    local               every client adds all of the noise that its own epsilon takes

Whole numbers, rounding and integer noise are those of the secure sums; masks are left out, because they cancel exactly
(tests/federated compares both ways). What is measured stays in benchmarks/results/federated, so that a run that was cut
off goes on; tables go to accuracy.json there and pictures to docs/pictures/federated*.png.

Rates and clipping were chosen by hand with central noise at epsilon 8 and 2, on another seed than those shown; local
noise has a server rate of its own, the best of three that were tried at epsilon 8 with one seed (it learnt with none).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.func import functional_call, grad, vmap

from keeping import once
from terrine import datasets, federated, sgd
from terrine.events import Budget, Neighbours
from terrine.federated.simulation import cut
from terrine.mechanisms import gaussian

KEPT = Path(__file__).parent / "results" / "federated"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
CLIENTS, PER_ROUND, SURVIVORS, CLIP, DELTA, BANDS = 1000, 50, 40, 0.5, 1e-4, 20
STEPS, BATCH, LOCAL_RATE, SERVER_RATE = 3, 10, 0.3, 2.0
SERVER_RATE_OF_LOCAL = 0.02
WAYS = ("not private", "central", "skellam", "discrete gaussian", "fixed order", "correlated", "local")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="mnist", choices=("mnist", "fashion-mnist"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--two-classes", action="store_true")
    parser.add_argument("--only-show", action="store_true", help="what is there already")
    parser.set_defaults(run=accuracy)


def accuracy(asked: argparse.Namespace) -> None:
    records = []
    for seed in range(asked.seeds):
        for epsilon in asked.epsilons:
            for way in asked.ways:
                settings = {
                    "data": asked.data, "two_classes": asked.two_classes, "way": way,
                    "epsilon": epsilon if way != "not private" else 0.0, "seed": seed, "rounds": asked.rounds,
                    "clients": CLIENTS, "per_round": PER_ROUND, "clip": CLIP,
                    "server_rate": SERVER_RATE_OF_LOCAL if way == "local" else SERVER_RATE,
                    "local": [STEPS, BATCH, LOCAL_RATE],
                }  # fmt: skip
                path = KEPT / f"{_name(settings)}.json"
                if asked.only_show and not path.exists():
                    continue
                records.append(once(path, settings, lambda s=settings: run(s)))
                print(_name(settings), records[-1]["curve"][-1], flush=True)
    found = show(records)
    ending = ("-two-classes" if asked.two_classes else "") + ("-fashion" if asked.data != "mnist" else "")
    (KEPT / f"accuracy{ending}.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(records, PICTURES / f"federated{ending}.png")


def _name(settings: dict[str, Any]) -> str:
    dealt = "two-classes" if settings["two_classes"] else "iid"
    return f"{settings['data']}-{dealt}-{settings['way'].replace(' ', '_')}-{settings['epsilon']:g}-{settings['seed']}"


@lru_cache(maxsize=2)
def _data(name: str, two_classes: bool) -> tuple[torch.Tensor, ...]:
    found = datasets.mnist() if name == "mnist" else datasets.fashion_mnist()
    x, test = (torch.from_numpy(one.copy()).float() / 255 for one in (found.train, found.test))
    rows = torch.from_numpy(np.stack(cut(found.train_labels, CLIENTS, 2 if two_classes else None)))
    labels = torch.from_numpy(found.train_labels)
    return x[rows], labels[rows], test, torch.from_numpy(found.test_labels)


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


class Together(federated.Federation):
    """A federation whose clients take their local steps at once."""

    def _updates(self, clients: Sequence[int]) -> dict[int, Any]:
        if not clients:
            return {}
        begun = {name: one.detach() for name, one in self.model.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(functional_call(self.model, weights, (x,)), y)

        x, y = self._rows
        rows = torch.stack([torch.randperm(x.shape[1])[: STEPS * BATCH] for _ in clients])
        which = torch.tensor(clients)
        weights = begun
        for step, part in enumerate(rows.split(BATCH, dim=1)):
            each = vmap(grad(loss), in_dims=(0 if step else None, 0, 0))
            slopes = each(weights, x[which[:, None], part], y[which[:, None], part])
            weights = {name: one - LOCAL_RATE * slopes[name] for name, one in weights.items()}
        changes = torch.cat([(one - begun[name]).flatten(1) for name, one in weights.items()], dim=1)
        return dict(zip(clients, changes.double().numpy(), strict=True))


def run(settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(settings["seed"])
    x, y, test, labels = _data(settings["data"], settings["two_classes"])
    model, plan = cnn(), plan_of(settings)
    curve: list[tuple[int, float]] = []

    def measure(done: int) -> None:
        if done % max(settings["rounds"] // 12, 1) == 0:
            with torch.no_grad():
                curve.append((done, round(float((model(test).argmax(dim=1) == labels).float().mean()), 4)))

    federation = Together(
        model, plan, list(zip(x, y, strict=True)), server=federated.FedAvg(settings["server_rate"]), full=False
    )
    federation._rows = x, y
    federation.fit(after=measure)
    private = settings["way"] != "not private"
    history = federation.history
    return {
        "curve": curve,
        "noise": plan.noise if private else None,
        "wrapped": history.wrapped,
        "closed": history.closed,
    }


def plan_of(settings: dict[str, Any]) -> federated.Plan:
    """Without privacy: next to no noise. Local: the noise of one client's own Gaussian, `per_round` times over."""
    shared = {"clients": CLIENTS, "per_round": PER_ROUND, "rounds": settings["rounds"], "clip": CLIP}
    kept: dict[str, Any] = {"dimension": sum(one.numel() for one in cnn().parameters())}
    match settings["way"]:
        case "not private":
            return federated.Plan(**shared, noise=1e-3, delta=DELTA)
        case "local":  # each turn is a release by the client itself: no sampling hides it, one vector for another
            turns = max(1, round(settings["rounds"] * PER_ROUND / CLIENTS))
            each = 2 * gaussian.noise_for(settings["epsilon"], DELTA) * np.sqrt(turns)
            return federated.Plan(**shared, noise=each * np.sqrt(PER_ROUND), delta=DELTA)
        case "skellam":
            kept["sums"] = federated.Skellam(bits=20, survivors=SURVIVORS)
        case "discrete gaussian":
            kept["sums"] = federated.DiscreteGaussian(bits=20, survivors=SURVIVORS)
        case "fixed order":
            kept["sampling"] = sgd.FixedOrder(Neighbours.ZERO_OUT)
        case "correlated":
            kept["sampling"], kept["correlated"] = sgd.FixedOrder(Neighbours.ZERO_OUT), sgd.Banded(BANDS)
    return federated.Plan(**shared, **kept, budget=Budget(settings["epsilon"], DELTA))


def show(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for one in records:
        groups.setdefault((one["settings"]["way"], one["settings"]["epsilon"]), []).append(one)
    table = Table("way", "epsilon", "accuracy", "seeds", "wrapped", title="1,000 clients")
    found = []
    for (way, epsilon), several in sorted(groups.items(), key=lambda one: (one[0][1], WAYS.index(one[0][0]))):
        by_seed = {one["settings"]["seed"]: one for one in several}
        values = [one["curve"][-1][1] for one in by_seed.values()]
        spread = float(np.std(values))
        found.append({"way": way, "epsilon": epsilon, "accuracy": float(np.mean(values)), "deviation": spread,
                      "seeds": len(values)})  # fmt: skip
        wrapped = max(one["wrapped"] for one in several)
        table.add_row(way, f"{epsilon:g}", f"{100 * np.mean(values):.2f} +- {100 * spread:.2f}", str(len(values)),
                      f"{wrapped:.1g}")  # fmt: skip
    Console().print(table)
    return found


def draw(records: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    epsilons = sorted({one["settings"]["epsilon"] for one in records} - {0.0})
    figure = Figure(figsize=(4 * len(epsilons), 3.6), layout="constrained")
    shared = None
    for place, epsilon in enumerate(epsilons):
        axes = shared = figure.add_subplot(1, len(epsilons), place + 1, sharey=shared)
        for way in WAYS:
            curves = [one["curve"] for one in records if one["settings"]["way"] == way
                      and one["settings"]["epsilon"] in (epsilon, 0.0)]  # fmt: skip
            if curves:
                mean = 100 * np.mean([[point[1] for point in curve] for curve in curves], axis=0)
                axes.plot([point[0] for point in curves[0]], mean, label=way)
        axes.set(title=f"epsilon {epsilon:g}", xlabel="rounds", ylabel="" if place else "accuracy, %")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
