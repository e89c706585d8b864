"""What the audit can and cannot see: known answers, real models, and known bugs.

    python benchmarks/audit.py [--only gaussian one_run f_dp overfit lira training final bugs]
        [--seeds 20] [--json out.json]

Digits come from scikit-learn, MNIST from $TERRINE_DATA. Seconds are given as CPU time and wall time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from terrine import audit, datasets, sgd
from terrine.accounting import gaussian
from terrine.audit import attacks, canaries, lira, one_run, shadows, shokri, whitebox
from terrine.events import Budget, Event
from terrine.pate.stacked import Recipe

sys.path.insert(0, str(Path(__file__).parent))
DELTA = 1e-5


def known_answers(seeds: int) -> dict[str, Any]:
    """The Gaussian mechanism, whose epsilon is known: a million runs on each of two neighbours."""
    rows = []
    print(
        f"{'epsilon':>8} {'delta':>7} {'gaussian fit':>13} {'ratio':>6} {'any mechanism':>14} {'ratio':>6} "
        f"{'above truth':>12}"
    )
    for delta in (DELTA, 1e-3):
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
            mu = float(brentq(lambda m, e=epsilon, d=delta: gaussian.epsilon(m, d) - e, 1e-3, 20))
            found = [_gaussian(mu, delta, seed) for seed in range(seeds)]
            fit, free = (float(np.median([one[place] for one in found])) for place in (0, 1))
            above = sum(max(one) > epsilon for one in found)
            rows.append(
                {"epsilon": epsilon, "delta": delta, "gaussian": fit, "free": free, "above": above, "seeds": seeds}
            )
            print(
                f"{epsilon:8.1f} {delta:7.0e} {fit:13.4f} {fit / epsilon:6.3f} {free:14.4f} {free / epsilon:6.3f} "
                f"{above:6d} of {seeds}"
            )
    return {"rows": rows, "worst ratio of the gaussian fit": min(row["gaussian"] / row["epsilon"] for row in rows)}


def theorem(_: int) -> dict[str, Any]:
    """The one-run bound on guesses that are perfect, random, or few."""
    cases = {
        "perfect": (1000, 1000),
        "random": (500, 1000),
        "ten right of ten, 990 abstained": (10, 10),
        "silent": (0, 0),
    }
    found = {}
    for name, (correct, made) in cases.items():
        guesses = one_run.Guesses(correct, made, 1000)
        found[name] = {delta: one_run.epsilon(guesses, delta=delta) for delta in (0.0, DELTA)}
        print(
            f"{name:34} epsilon at least {found[name][0.0]:.4f} at delta 0, {found[name][DELTA]:.4f} at delta {DELTA:g}"
        )
    print(f"{'perfect, by hand':34} q^1000 = 0.05: epsilon {-math.log(0.05 ** (-1 / 1000) - 1):.4f}")
    return {name: {str(delta): value for delta, value in one.items()} for name, one in found.items()}


def trade_off(seeds: int) -> dict[str, Any]:
    """One run with 1,000 canaries, each seen through Gaussian noise of known epsilon: both theorems; medians."""
    rows = []
    print(f"{'epsilon':>8} {'Steinke':>8} {'any mechanism':>14} {'f-DP, Gaussian':>15} {'above truth':>12}")
    for epsilon in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0):
        mu = float(brentq(lambda m, e=epsilon: gaussian.epsilon(m, DELTA) - e, 1e-3, 20))
        found = np.array([_one_run(mu, seed) for seed in range(seeds)])
        steinke, free, fit = np.median(found, axis=0)
        above = int((found.max(axis=1) > epsilon).sum())
        tighter = int((found[:, 2] > found[:, 0]).sum())
        rows.append({"epsilon": epsilon, "steinke": steinke, "any": free, "f-dp": fit, "above": above})
        print(
            f"{epsilon:8.1f} {steinke:8.3f} {free:14.3f} {fit:15.3f} {above:6d} of {seeds}   "
            f"f-DP tighter than Steinke in {tighter} of {seeds}"
        )
    return {"rows": rows}


def overfit(_: int) -> dict[str, Any]:
    """Models that learned by heart, and the same models trained at epsilon 1.

    MNIST: 150 images, each in by a coin. Digits: 400 mislabelled canaries, each in by a coin, among 1,397 others.
    """
    outcomes: dict[str, Any] = {}
    for data in ("MNIST", "digits"):
        x, y = _mnist(4000) if data == "MNIST" else _digits()
        pool = np.random.default_rng(6).permutation(len(x))[: 150 if data == "MNIST" else 400]
        included = np.random.default_rng(5).random(len(pool)) < 0.5
        rest = np.setdiff1d(np.arange(len(x)), pool)
        labels = y if data == "MNIST" else canaries.mislabelled(y, canaries=pool, classes=10)
        inside = torch.from_numpy(pool[included] if data == "MNIST" else np.concatenate([pool[included], rest]))
        for name, train in (("not private", _by_heart), ("epsilon 1", _privately)):
            model = train(x[inside], labels[inside])
            with torch.no_grad():
                logits = model(x[pool]).double().numpy()
                accuracy = float((model(x[rest]).argmax(1) == y[rest]).float().mean())
            for attack, signal in _signals(model, logits, x[pool], labels[pool]).items():
                title = f"{data:6} {name:12} {attack:14}"
                outcomes[title] = _judge(title, signal, included, accuracy)
    return outcomes


def likelihood_ratios(_: int) -> dict[str, Any]:
    """LiRA against the loss threshold, 64 shadows each on digits, 32 on MNIST."""
    outcomes = {}
    torch.set_num_threads(1)  # products of small matrices: a second thread costs more than it gives
    for name, (x, y), width, models in (("digits", _digits(), 64, 64), ("MNIST", _mnist(2000), 32, 32)):
        wall, cpu = time.perf_counter(), time.process_time()
        trained = shadows.train(
            lambda x=x, width=width: nn.Sequential(nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, 10)),
            x,
            y,
            models=models,
            recipe=Recipe(epochs=40, batch=128, learning_rate=5e-3),
        )
        phi = trained.confidences(x, y)
        ratios, truth = lira.leave_one_out(phi, trained.included)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        outcomes[name] = _compared(name, trained, x, y, phi, ratios, truth) | {"wall": wall, "cpu": cpu}
        print(f"{name}: {models} shadows and LiRA on each of them: {wall:.1f} s, {cpu:.1f} s of CPU")
    return outcomes


def training(seeds: int) -> dict[str, Any]:
    """Gradient canaries inside a training on the digits: what one run proves, and what canaries cost; medians.

    1,500 rows, lots of 250 or of all; at most three runs each.
    """
    outcomes: dict[str, Any] = {}
    print("claim   lot canaries  test accuracy  any mechanism  only the noise in doubt (least to most)")
    for claim, lot, count in (
        *((1.0, 250, count) for count in (0, 1000)),
        *((8.0, lot, count) for lot in (250, 1500) for count in (0, 1000, 4000)),
        *((math.inf, 250, count) for count in (0, 1000)),
    ):
        found = np.array([_watched(claim, lot, count, seed) for seed in range(min(3, seeds))])
        accuracy, free, inside = np.median(found, axis=0)
        outcomes[f"{claim:g}, lots of {lot}, {count} canaries"] = {"any": free, "within": inside, "accuracy": accuracy}
        spread = f"({found[:, 2].min():.3f} to {found[:, 2].max():.3f})"
        print(f"{claim:5g} {lot:5d} {count:8d} {accuracy:14.3f} {free:14.3f} {inside:10.3f} {spread}", flush=True)
    return outcomes


def final_model(_: int) -> dict[str, Any]:
    """MNIST, epsilon 10, the finished model only: canaries are images of one pixel that is blank in all others.

    A linear model, 2,000 images, full lots, 64 runs: together one mechanism whose canaries each touch one of the runs.
    """
    x, y = _mnist(2000)
    blank = np.flatnonzero(x.numpy().max(axis=0) == 0)
    plan = sgd.Plan(examples=len(x) + len(blank), lot=len(x) + len(blank), clip=0.1, steps=20, budget=Budget(10, DELTA))
    scores, coins = [], []
    for run in range(64):
        included, found = _with_pixels(x, y, blank, plan, run)
        scores.append(found)
        coins.append(included)
    evidence = one_run.guess(np.concatenate(scores), np.concatenate(coins))
    steinke = max(one_run.epsilon(one, delta=DELTA, confidence=evidence.share) for one in evidence.guesses)
    free, inside = evidence.epsilon_at(DELTA), evidence.within(partial(_with_noise, plan), DELTA)
    area = audit.roc(audit.Scores.split(np.concatenate(scores), np.concatenate(coins))).auc()
    print(
        f"{len(np.concatenate(coins))} canaries, area {area:.3f}: epsilon >= {steinke:.3f} (Steinke), >= {free:.3f} "
        f"(any mechanism), >= {inside:.3f} (this plan, its noise in doubt); published: 4.91"
    )
    return {"steinke": steinke, "any": free, "within": inside, "area": area}


def bugs(seeds: int) -> dict[str, Any]:
    """Known bugs, each built into Terrine's learners; and the correct learners over many seeds."""
    import audit_bugs

    outcomes: dict[str, Any] = {}
    for name, (bug, run) in audit_bugs.BUGS.items():
        start = time.process_time()
        with bug():
            verdict = run(0)
        outcomes[name] = {"violated": verdict.violated, "bound": verdict.bound, "seconds": time.process_time() - start}
        print(
            f"{name:46} {'VIOLATED' if verdict.violated else 'missed  '} epsilon >= {verdict.bound:.2f}, claimed 1 "
            f"({outcomes[name]['seconds']:.1f} s)"
        )
    for name, run in audit_bugs.AUDITS.items():
        verdicts = [run(seed) for seed in range(seeds)]
        alarms, largest = sum(one.violated for one in verdicts), max(one.bound for one in verdicts)
        outcomes[f"correct: {name}"] = {"violated": alarms, "seeds": seeds, "largest bound": largest}
        print(f"correct: {name:37} VIOLATED {alarms} of {seeds} seeds, largest bound {largest:.2f}")
    return outcomes


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gaussian": known_answers,
    "one_run": theorem,
    "f_dp": trade_off,
    "overfit": overfit,
    "lira": likelihood_ratios,
    "training": training,
    "final": final_model,
    "bugs": bugs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    found = {}
    for name in options.only:
        print(f"\n== {name}: {SECTIONS[name].__doc__}")
        found[name] = SECTIONS[name](options.seeds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _gaussian(mu: float, delta: float, seed: int, runs: int = 1_000_000) -> tuple[float, float]:
    generator = np.random.default_rng([seed, 11])
    evidence = audit.bound(generator.normal(mu, 1, runs), generator.normal(0, 1, runs), delta=delta)
    return evidence.gaussian(delta), evidence.epsilon_at(delta)


def _one_run(mu: float, seed: int, canaries: int = 1000) -> tuple[float, float, float]:
    generator = np.random.default_rng([seed, 12])
    included = generator.random(canaries) < 0.5
    found = one_run.guess(included * mu + generator.normal(size=canaries), included)
    steinke = max(one_run.epsilon(one, delta=DELTA, confidence=found.share) for one in found.guesses)
    return steinke, found.epsilon_at(DELTA), found.gaussian(DELTA)


def _watched(claim: float, lot: int, count: int, seed: int) -> tuple[float, float, float]:
    """Test accuracy of one run, and what its canaries prove: of any mechanism, and if only the noise is in doubt."""
    x, y = _digits()
    order = np.random.default_rng(2).permutation(len(x))
    held, seen = torch.from_numpy(order[:297]), torch.from_numpy(order[297:])
    noise = {"noise": 0.0, "delta": DELTA} if claim == math.inf else {"budget": Budget(claim, DELTA)}
    plan = sgd.Plan(examples=len(seen), lot=lot, clip=1.0, steps=100, seed=1 + seed, **noise)
    model = _network(64)
    trainer = sgd.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.5), nn.functional.cross_entropy, plan, progress=False
    )
    free = inside = 0.0
    if count:
        found = canaries.Canaries.fit(trainer, (x[seen], y[seen]), count=count, seed=3 + seed)[1].evidence()
        free = found.epsilon_at(DELTA)
        inside = 0.0 if claim == math.inf else found.within(partial(_with_noise, plan), DELTA)
    else:
        trainer.fit((x[seen], y[seen]))
    return trainer.evaluate((x[held], y[held])).accuracy, free, inside


def _with_noise(plan: sgd.Plan, noise: float) -> Event:
    return replace(plan, noise=noise, budget=None, delta=DELTA).event


def _with_pixels(x: Tensor, y: Tensor, blank: np.ndarray, plan: sgd.Plan, run: int) -> tuple[np.ndarray, np.ndarray]:
    """Coins, and how far each canary's label stands out among the finished model's logits."""
    generator = np.random.default_rng([run, 13])
    images = torch.zeros(len(blank), x.shape[1])
    images[torch.arange(len(blank)), torch.from_numpy(blank)] = 1.0
    labels, included = torch.from_numpy(generator.integers(0, 10, len(blank))), generator.random(len(blank)) < 0.5
    silent = torch.where(torch.from_numpy(included), labels, -100)
    model = nn.Linear(x.shape[1], 10, bias=False)
    nn.init.zeros_(model.weight)
    trainer = sgd.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        nn.CrossEntropyLoss(reduction="none"),
        plan,
        progress=False,
    )
    trainer.fit((torch.cat([x, images]), torch.cat([y, silent])))
    with torch.no_grad():
        logits = model(images).double()
    return included, (logits.gather(1, labels[:, None])[:, 0] - logits.mean(dim=1)).numpy()


def _judge(title: str, signal: np.ndarray, included: np.ndarray, accuracy: float) -> dict[str, Any]:
    scores = audit.Scores.split(signal, included)
    area = audit.summary(scores, resamples=200).auc
    rates = audit.bound(scores, delta=DELTA)
    guessed = one_run.guess(signal, included)
    verdict = audit.verdict(Budget(1.0, DELTA), guessed)
    print(
        f"{title} area {area.value:.3f} ({area.low:.3f}..{area.high:.3f}); "
        f"epsilon >= {guessed.epsilon_at(DELTA):.3f} (one run), "
        f">= {rates.epsilon_at(DELTA):.3f} (Clopper-Pearson); accuracy {accuracy:.3f}; against a claim of 1: "
        f"{'VIOLATED' if verdict.violated else 'consistent'}"
    )
    return {
        "auc": area.value,
        "one run": guessed.epsilon_at(DELTA),
        "rates": rates.epsilon_at(DELTA),
        "violated": verdict.violated,
    }


def _compared(
    name: str, trained: shadows.Shadows, x: Tensor, y: Tensor, phi: np.ndarray, ratios: np.ndarray, truth: np.ndarray
) -> dict[str, Any]:
    logits, labels = trained.logits(x), y.numpy()
    half = len(logits) // 2
    learned = shokri.fit(logits[half:], labels, trained.included[half:])
    offline = np.stack(
        [lira.offline(phi[one], np.delete(phi, one, 0), np.delete(trained.included, one, 0)) for one in range(len(phi))]
    )
    table = {
        "loss threshold": audit.Scores.split(attacks.loss(logits, labels).ravel(), trained.included.ravel()),
        "shadow attack model": audit.Scores.split(
            np.concatenate([learned.score(one, labels) for one in logits[:half]]), trained.included[:half].ravel()
        ),
        "LiRA offline": audit.Scores.split(offline.ravel(), truth.ravel()),
        "LiRA online": audit.Scores.split(ratios.ravel(), truth.ravel()),
    }
    found = {}
    for attack, scores in table.items():
        known = audit.summary(scores, resamples=200)
        found[attack] = {"auc": known.auc.value, "tpr at 0.1%": known.at_one_in_thousand.value}
        print(
            f"{name:8} {attack:20} area {known.auc.value:.3f}, "
            f"true positives at 1% {100 * known.at_one_percent.value:.2f}%, "
            f"at 0.1% {100 * known.at_one_in_thousand.value:.2f}% "
            f"({100 * known.at_one_in_thousand.low:.2f}..{100 * known.at_one_in_thousand.high:.2f})"
        )
    return found


def _signals(model: nn.Module, logits: np.ndarray, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    return {
        "loss": attacks.loss(logits, y.numpy()),
        "entropy": attacks.modified_entropy(logits, y.numpy()),
        "gradient norm": whitebox.gradient_norm(model, nn.functional.cross_entropy, x, y),
    }


def _network(features: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 10))


def _by_heart(x: Tensor, y: Tensor) -> nn.Module:
    model = _network(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def _privately(x: Tensor, y: Tensor) -> nn.Module:
    model = _network(x.shape[1])
    plan = sgd.Plan(examples=len(x), lot=len(x) // 4, clip=1.0, steps=60, budget=Budget(1.0, DELTA), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in sgd.private_steps(model, optimizer, (x, y), plan, loss=nn.CrossEntropyLoss()):
        optimizer.step()
    return model


def _digits() -> tuple[Tensor, Tensor]:
    held = datasets.digits()
    pixels, labels = np.concatenate([held.train, held.test]), np.concatenate([held.train_labels, held.test_labels])
    x = torch.from_numpy(pixels.reshape(len(pixels), -1)).float()
    return x / x.max(), torch.from_numpy(labels)


def _mnist(count: int) -> tuple[Tensor, Tensor]:
    held = datasets.mnist()
    chosen = np.random.default_rng(3).permutation(len(held.train))[:count]
    return torch.from_numpy(held.train[chosen].reshape(count, -1)).float() / 255, torch.from_numpy(
        held.train_labels[chosen]
    )


if __name__ == "__main__":
    main()
