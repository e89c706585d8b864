"""The demonstration, offline, everything real: an attack before and after privacy, a ledger, a forged claim; one page.

The same attack looks at every finished model: some rows carry a wrong label, fair coins put them in or left them out,
and whoever can tell which learned something about single people. A second audit of DP-SGD trains a twin by the same
plan, with gradient canaries that an attacker sees at every step (`twin.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from terrine import sgd
from terrine.audit import Scores, metrics, one_run, verdict
from terrine.audit.scores import Floats
from terrine.events import Budget
from terrine.pipeline import baseline, by_sgd, coins, pages, recipes, twin
from terrine.pipeline.demo_clinic import BUDGET, Clinic, Forgery, clinic, forgery
from terrine.pipeline.folder import PRIVACY, Folder
from terrine.pipeline.job import train
from terrine.pipeline.material import Material, open_data
from terrine.pipeline.settings import Settings
from terrine.pipeline.trained import load
from terrine.report import figures
from terrine.report.page import render, style_sheet
from terrine.rounding import up

EPSILONS = (1.0, 3.0, 8.0)
_CANARIES = 1000
_DELTA = 1e-5
_STEPS = 600


@dataclass(frozen=True)
class Row:
    """One model of the demonstration."""

    name: str
    epsilon: float | None
    delta: float | None
    accuracy: float
    curve: tuple[Floats, Floats]
    """False alarms, and found of those who were in, of the attack on the finished model."""
    model_audit: float
    """Epsilon is at least this, by that attack."""
    canary_audit: float | None
    """Epsilon is at least this, by canaries in a twin run."""
    verdict: str

    @property
    def area(self) -> float:
        """The area under the attack's curve; 0.5 is guessing."""
        return float(np.trapezoid(self.curve[1], self.curve[0]))


@dataclass(frozen=True)
class DemoResult:
    """What is shown."""

    rows: list[Row]
    clinic: Clinic
    forgery: Forgery


def demonstrate(out: Path, *, progress: Callable[[str], Any], quiet: bool = False) -> DemoResult:
    """Make every run anew in `out`, and the page `out/report.html`."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "runs", ignore_errors=True)
    material = open_data(Settings(epsilon=1.0, data="digits")).look({})
    assert material.test is not None
    rows = [_by_sgd(out, epsilon, material, progress, quiet) for epsilon in EPSILONS]
    rows.insert(0, _baseline(out, material))
    found = clinic(out, progress=progress, quiet=quiet)
    shown = DemoResult(rows, found, forgery(found.folder, out / "forged"))
    _write(out, shown, material)
    return shown


def _baseline(out: Path, material: Material) -> Row:
    """On the features of the last run by DP-SGD, whose whitening has the least noise.

    Without clipping or noise, wrong labels are learned by heart and cost accuracy: the accuracy is that of a model
    without canaries, the attack is on one with them.
    """
    assert material.test is not None
    folder, count = out / "runs" / "baseline", len(material.labels)
    folder.mkdir(parents=True)
    architecture = load(out / "runs" / f"sgd-{EPSILONS[-1]:g}").architecture
    features = architecture.features(material.inputs)
    tossed = coins.tossed(folder / "coins.npz", units=count, count=_mislabelled(material), seed=None)
    taught, kept = coins.mislabelled(material, tossed.units), np.setdiff1d(np.arange(count), tossed.out)
    attacked = baseline.unsafe_train(architecture, features[torch.from_numpy(kept)], taught[kept], steps=_STEPS)
    scores = by_sgd.scores(attacked, features, taught, material.units, tossed.units)
    curve = metrics.roc(Scores.split(scores, tossed.heads))
    plain = baseline.unsafe_train(architecture, features, material.labels, steps=_STEPS)
    with torch.no_grad():
        told = plain(architecture.features(material.test[0])).argmax(dim=1).numpy()
    return Row(
        "not private",
        None,
        None,
        float((told == material.test[1]).mean()),
        (curve.false_positive_rate, curve.true_positive_rate),
        one_run.guess(scores, tossed.heads).epsilon_at(_DELTA),
        None,
        "no claim",
    )


def _mislabelled(material: Material) -> int:
    """How many canaries every run has."""
    return recipes.canaries(Settings(epsilon=1.0, data="digits"), len(material.labels))


def _by_sgd(out: Path, epsilon: float, material: Material, progress: Callable[[str], Any], quiet: bool) -> Row:
    settings = Settings(epsilon=epsilon, data="digits")
    folder = train(settings, out / "runs" / f"sgd-{epsilon:g}", progress=progress, quiet=quiet)
    pages.write(folder)
    return _row("DP-SGD", folder, material, _twin(folder, material))


def _row(name: str, folder: Folder, material: Material, twin: one_run.OneRun | None) -> Row:
    assert material.test is not None
    claim, found = folder.read(PRIVACY), pages.audited(folder)
    assert found is not None
    against = twin is not None and verdict(Budget(claim["epsilon"], claim["delta"]), twin).violated
    nothing = (np.array([0.0, 1.0]), np.array([0.0, 1.0]))  # every coin fell on one side
    return Row(
        name,
        claim["epsilon"],
        claim["delta"],
        load(folder.path).accuracy(*material.test),
        nothing if found["curve"] is None else found["curve"],
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
    planted = twin.attacked(
        architecture.build(), plan, (architecture.features(material.inputs), torch.from_numpy(material.labels)),
        count=_CANARIES, learning_rate=claim["learning_rate"], momentum=claim["momentum"],
        criterion=nn.CrossEntropyLoss(reduction="none"),
    )  # fmt: skip
    return planted.evidence()


def _write(out: Path, shown: DemoResult, material: Material) -> None:
    from markupsafe import Markup

    assert material.test is not None
    rows, counts = shown.rows, np.bincount(material.test[1])
    points = {"DP-SGD": [(row.epsilon, row.accuracy) for row in rows if row.epsilon is not None]}
    text = render(
        "demo.html",
        {
            "style": Markup(style_sheet()),
            "rows": rows,
            "examples": len(material.labels),
            "tested": len(material.test[1]),
            "canaries": _CANARIES,
            "mislabelled": _mislabelled(material),
            "attacks": Markup(figures.attacks({_title(row): row.curve for row in _shown(rows)})),
            "leak": rows[0].model_audit,
            "private": _shown(rows)[-1],
            "figure": Markup(
                figures.accuracy_against_epsilon(
                    points, {"not private": rows[0].accuracy, "commonest class": float(counts.max() / counts.sum())}
                )
            ),
            "clinic": shown.clinic,
            "budget": BUDGET,
            "forgery": shown.forgery,
        },
    )
    Folder(out).write_text("report.html", text)


def _shown(rows: list[Row]) -> list[Row]:
    """The two models of the picture: without privacy, and by DP-SGD with the largest epsilon, the least protected."""
    return [rows[0], max((row for row in rows if row.name == "DP-SGD"), key=lambda row: row.epsilon or 0.0)]


def _title(row: Row) -> str:
    return row.name if row.epsilon is None else f"{row.name}, epsilon {up(row.epsilon, 2)}"
