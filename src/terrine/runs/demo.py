"""The demonstration: digits, offline, everything real: a baseline, DP-SGD, PATE, an audit of each, one page.

Two audits look at each DP-SGD run. One attacks the finished model: fair coins put rows in or left them out. The other
trains a twin by the same plan, with gradient canaries that an attacker sees at every step [SNJ23]: the strongest attack
the claim has to withstand.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from terrine import sgd
from terrine.audit import Scores, attacks, metrics, one_run, verdict
from terrine.audit.canaries import Canaries
from terrine.events import Budget
from terrine.report import figures
from terrine.report.page import render, style_sheet
from terrine.runs import baseline, coins, pages
from terrine.runs.folder import PRIVACY, Folder
from terrine.runs.job import train
from terrine.runs.material import Material, open_data
from terrine.runs.settings import Settings
from terrine.runs.trained import load

EPSILONS = (1.0, 3.0, 8.0)
PATE_EPSILON = 8.0
_CANARIES = 1000


@dataclass(frozen=True)
class Row:
    """One model of the demonstration."""

    name: str
    epsilon: float | None
    delta: float | None
    accuracy: float
    area: float
    """The area under the attack's ROC curve; 0.5 is guessing."""
    model_audit: float
    """Epsilon is at least this, by the attack on the finished model."""
    canary_audit: float | None
    """Epsilon is at least this, by canaries in a twin run."""
    verdict: str


def demonstrate(out: Path, *, progress: Callable[[str], Any], quiet: bool = False) -> list[Row]:
    """Make every run anew in `out`, and the page `out/report.html`."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "runs", ignore_errors=True)
    material = open_data(Settings(epsilon=1.0, data="digits", method="pate")).look({})
    assert material.test is not None
    rows = [_by_sgd(out, epsilon, material, progress, quiet) for epsilon in EPSILONS]
    rows.insert(0, _baseline(out, material))
    rows.append(_by_pate(out, material, progress, quiet))
    _write(out, rows, material)
    return rows


def _baseline(out: Path, material: Material) -> Row:
    """On the features of the last run by DP-SGD, whose whitening has the least noise."""
    assert material.test is not None
    folder = out / "runs" / "baseline"
    folder.mkdir(parents=True)
    architecture = load(out / "runs" / f"sgd-{EPSILONS[-1]:g}").architecture
    features = architecture.features(material.inputs)
    tossed = coins.tossed(folder / "coins.npz", units=len(material.labels), count=len(material.labels) // 10, seed=None)
    kept = np.setdiff1d(np.arange(len(material.labels)), tossed.out)
    module = baseline.unsafe_train(architecture, features[torch.from_numpy(kept)], material.labels[kept])
    with torch.no_grad():
        logits = module(features[torch.from_numpy(tossed.units)]).double().numpy()
        told = module(architecture.features(material.test[0])).argmax(dim=1).numpy()
    scores = attacks.confidence(logits, material.labels[tossed.units])
    found = one_run.guess(scores, tossed.heads).epsilon_at(1e-5)
    area = metrics.roc(Scores.split(scores, tossed.heads)).auc()
    accuracy = float((told == material.test[1]).mean())
    return Row("not private", None, None, accuracy, area, found, None, "no claim")


def _by_sgd(out: Path, epsilon: float, material: Material, progress: Callable[[str], Any], quiet: bool) -> Row:
    settings = Settings(epsilon=epsilon, data="digits")
    folder = train(settings, out / "runs" / f"sgd-{epsilon:g}", progress=progress, quiet=quiet)
    pages.write(folder)
    return _row("DP-SGD", folder, material, _twin(folder, material))


def _by_pate(out: Path, material: Material, progress: Callable[[str], Any], quiet: bool) -> Row:
    settings = Settings(epsilon=PATE_EPSILON, data="digits", method="pate")
    folder = train(settings, out / "runs" / f"pate-{PATE_EPSILON:g}", progress=progress, quiet=quiet)
    pages.write(folder)
    return _row("PATE", folder, material, None)


def _row(name: str, folder: Folder, material: Material, twin: one_run.OneRun | None) -> Row:
    assert material.test is not None
    claim, found = folder.read(PRIVACY), pages.audited(folder)
    assert found is not None
    against = twin is not None and verdict(Budget(claim["epsilon"], claim["delta"]), twin).violated
    curve = found["curve"]
    return Row(
        name,
        claim["epsilon"],
        claim["delta"],
        load(folder.path).accuracy(*material.test),
        0.5 if curve is None else float(np.trapezoid(curve[1], curve[0])),
        found["lower"],
        None if twin is None else twin.epsilon_at(claim["delta"]),
        "VIOLATED" if found["violated"] or against else "consistent",
    )


def _twin(folder: Folder, material: Material) -> one_run.OneRun:
    """The same plan once more, with canaries; its model is thrown away."""
    claim, architecture = folder.read(PRIVACY), load(folder.path).architecture
    plan = sgd.Plan(
        examples=claim["examples"],
        lot=claim["lot"],
        steps=claim["steps"],
        clip=claim["clip"],
        noise=claim["noise"],
        delta=claim["delta"],
    )
    module = architecture.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=claim["learning_rate"], momentum=claim["momentum"])
    trainer = sgd.Trainer(module, optimizer, nn.CrossEntropyLoss(reduction="none"), plan, progress=False)
    rows = (architecture.features(material.inputs), torch.from_numpy(material.labels))
    _, planted = Canaries.fit(trainer, rows, count=_CANARIES)
    return planted.evidence()


def _write(out: Path, rows: list[Row], material: Material) -> None:
    from markupsafe import Markup

    assert material.test is not None
    counts = np.bincount(material.test[1])
    points: dict[str, list[tuple[float, float]]] = {"DP-SGD": [], "PATE": []}
    for row in rows:
        if row.epsilon is not None:
            points[row.name].append((row.epsilon, row.accuracy))
    picture = out / "accountants.png"
    text = render(
        "demo.html",
        {
            "style": Markup(style_sheet()),
            "rows": rows,
            "examples": len(material.labels),
            "tested": len(material.test[1]),
            "canaries": _CANARIES,
            "figure": Markup(
                figures.accuracy_against_epsilon(
                    points, {"not private": rows[0].accuracy, "commonest class": float(counts.max() / counts.sum())}
                )
            ),
            "accountants": base64.b64encode(picture.read_bytes()).decode() if picture.exists() else None,
        },
    )
    Folder(out).write_text("report.html", text)
