"""A run by DP-SGD.

Rows that a coin left out carry no label: their loss is 0, so they add nothing to any sum, and the number of examples
and the sampling rate stay what the plan says. Without public test rows, the accuracy is a count of right answers on
the rows left out, released with noise and paid for by a twentieth of epsilon, as part of the plan's event.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terrine import mechanisms, sgd
from terrine.audit import attacks
from terrine.events import Budget, Event
from terrine.rng import SYSTEM, Seeded
from terrine.runs import coins, recipes
from terrine.runs.folder import Folder
from terrine.runs.learned import Learned
from terrine.runs.material import Material
from terrine.runs.models import Architecture
from terrine.runs.settings import Settings
from terrine.sgd.averaging import Average
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.private import Account

SILENT = -100
"""The label of a row that adds nothing to any sum."""
_SHARE_FOR_ACCURACY = 0.05


def learn(
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    features: Tensor,
    account: Account | None,
    *,
    quiet: bool,
) -> Learned:
    """Train on the private rows, or go on where the run stopped."""
    count = len(material.labels)
    tossed = coins.of_run(folder.owner, settings, count)
    measured = _measured(settings) if material.test is None and len(tossed.out) else None
    usual = recipes.recipe(settings, architecture.kind, count)
    before = (*material.preparation, *(() if measured is None else (measured.event,)))
    plan = _plan(settings, usual, count, before)
    rate = settings.learning_rate or recipes.learning_rate(
        architecture.kind, noise=plan.noise, lot=plan.lot, clip=usual.clip
    )
    labels = torch.from_numpy(material.labels.copy())
    labels[torch.from_numpy(tossed.out)] = SILENT
    module = built(architecture, settings)
    trainer(folder.owner / "checkpoint.pt", module, plan, rate, usual, account, quiet).fit(
        (features, labels), purpose="terrine train"
    )
    found = scores(module, features[torch.from_numpy(tossed.rows)], material.labels[tossed.rows])
    return Learned(
        module,
        plan.event,
        plan.epsilon,
        plan.delta,
        found if len(tossed.rows) else None,
        tossed.heads if len(tossed.rows) else None,
        facts=facts(plan, rate, usual),
        accuracy=None
        if measured is None
        else _accuracy(folder, settings, measured, module, material, features, tossed),
    )


def _plan(settings: Settings, usual: recipes.Recipe, count: int, before: tuple[Event, ...]) -> sgd.Plan:
    return sgd.Plan(
        examples=count,
        lot=usual.lot,
        epochs=usual.epochs,
        clip=usual.clip,
        budget=Budget(settings.epsilon, recipes.delta(settings, count)),
        preparation=before,
        seed=settings.test_seed,
    )


def built(architecture: Architecture, settings: Settings) -> nn.Module:
    """The module before training."""
    with torch.random.fork_rng(devices=[], enabled=settings.test_seed is not None):
        if settings.test_seed is not None:
            torch.manual_seed(settings.test_seed)
        return architecture.build()


def trainer(
    checkpoint: Path,
    module: nn.Module,
    plan: sgd.Plan,
    rate: float,
    usual: recipes.Recipe,
    account: Account | None,
    quiet: bool,
) -> sgd.Trainer:
    """What trains `module` as planned, and goes on from `checkpoint`."""
    return sgd.Trainer(
        module,
        torch.optim.SGD(module.parameters(), lr=rate, momentum=usual.momentum),
        nn.CrossEntropyLoss(reduction="none", ignore_index=SILENT),
        plan,
        account=account,
        average=Average(usual.average),
        checkpoint=Checkpoint(checkpoint, every=max(1, plan.steps // 10)),
        progress=False if quiet else None,
    )


def scores(module: nn.Module, features: Tensor, labels: Any) -> Any:
    """How sure the module is of each row's label: what the audit attacks."""
    with torch.no_grad():
        return attacks.confidence(module(features).double().numpy(), labels) if len(labels) else np.zeros(0)


def _measured(settings: Settings) -> mechanisms.Counts:
    return mechanisms.Counts(epsilon=_SHARE_FOR_ACCURACY * settings.epsilon)


def _accuracy(
    folder: Folder,
    settings: Settings,
    measured: mechanisms.Counts,
    module: nn.Module,
    material: Material,
    features: Tensor,
    tossed: coins.Coins,
) -> dict[str, Any]:
    """Released once: what was drawn is kept, and read back by whoever asks again."""
    if folder.has("owner/accuracy.json"):
        return folder.read("owner/accuracy.json")
    with torch.no_grad():
        told = module(features[torch.from_numpy(tossed.out)]).argmax(dim=1).numpy()
    right = int((told == material.labels[tossed.out]).sum())
    source = SYSTEM if settings.test_seed is None else Seeded(settings.test_seed)
    noisy = int(np.asarray(measured.release(right, rng=source).value).reshape(-1)[0])
    record = {
        "accuracy": min(max(noisy / len(tossed.out), 0.0), 1.0),
        "rows": len(tossed.out),
        "measured_on": "private rows that were not trained on; a noisy count, paid for by a twentieth of epsilon",
        "off_by_at_most": measured.error(confidence=0.95) / len(tossed.out),
    }
    folder.write("owner/accuracy.json", record)
    return record


def facts(plan: sgd.Plan, rate: float, usual: recipes.Recipe) -> dict[str, Any]:
    """Public facts about the training, for the record."""
    return {
        "sampler": "Poisson: every example falls into each lot independently",
        "noise": plan.noise,
        "clip": usual.clip,
        "lot": plan.lot,
        "rate": plan.rate,
        "steps": plan.steps,
        "epochs": usual.epochs,
        "examples": plan.examples,
        "learning_rate": rate,
        "momentum": usual.momentum,
        "average": usual.average,
    }
