"""`train`: everything from the private rows to the finished folder, each step taken up where it stopped."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terrine import __version__, accounting, check, files, verify
from terrine.audit import folder as audit_files
from terrine.errors import InvalidArgument
from terrine.events import is_reproducible, settled_neighbours, settled_unit
from terrine.events.codec import to_dict
from terrine.pipeline import (
    affording,
    baseline,
    bounds,
    by_pate,
    by_release,
    by_sgd,
    measuring,
    pages,
    planning,
    recipes,
    trained,
    tuning,
    whitened,
)
from terrine.pipeline.folder import EVENTS, PRIVACY, RECEIPT, RESULTS, Folder
from terrine.pipeline.learned import Learned
from terrine.pipeline.material import Integers, Material, Opened, open_data
from terrine.pipeline.models import Architecture
from terrine.pipeline.planning import RunPlan
from terrine.pipeline.settings import Settings
from terrine.receipts import Charged, Payment, Receipt, finish, paid, unused
from terrine.report import page
from terrine.verify import manifest, signing

Progress = Callable[[str], Any]
_BOUNDS = "owner/bounds.json"


def _nothing(_plan: RunPlan) -> None:
    return None


@contextlib.contextmanager
def _silent(_title: str) -> Any:
    yield None


def train(
    settings: Settings,
    out: str | Path,
    *,
    account: Charged | None = None,
    purpose: str = "terrine train",
    by: str = "terrine.pipeline",
    head: Callable[[], str] | None = None,
    progress: Progress = _silent,
    quiet: bool = True,
    sign: str | Path | None = None,
    said: Callable[[RunPlan], Any] = _nothing,
) -> Folder:
    """Train as the settings say, into the folder `out`; a run that is over is left as it is.

    Guarantee: the model, privacy.json, results.json and the model card cost at most the event in privacy.json, which
    the account is charged for before anything is drawn, written or looked at; all that is known before are the number
    of rows (with `person`, of people) and the columns. `head` asks the account's ledger for its head, which goes into
    the report. `said` is given the plan before the charge. `sign` is a file with a private key that signs the
    manifest. The report and audit/ hold the audit's findings about private rows: they are for the data owner.

    Raises:
        InvalidArgument: the data, the settings or the folder do not fit.
        BudgetExceeded: the account has not enough left; nothing was trained, and nothing is left behind.
    """
    folder, key = Folder(out), None if sign is None else signing.load_private(Path(sign))
    settings = affording.bounded(settings, account, folder)
    folder.check(settings)
    if folder.done:
        tuning.forget(folder)
        finish(folder.path / RECEIPT)
        return _signed(folder, key)
    page.check_installed()
    opened = open_data(settings)
    plan = planning.plan(settings, opened)
    begun = unused(folder.path / RECEIPT)
    if not begun:
        if plan.epsilon <= 0:
            raise check.refuse(
                "epsilon", settings.epsilon, "one that is not certified as 0", "nothing can be learned at it"
            )
        affording.check(plan, opened, account)
    with files.unmade_if_refused(folder.owner):
        if not begun:
            folder.make()
            said(plan)
        payment = Payment(account, purpose, by, head)
        receipt = paid(folder.path / RECEIPT, plan.event, payment, settings=settings.as_dict())
    folder.begin(settings)
    try:
        _train(folder, plan, opened, receipt, progress, quiet)
    except OSError as error:
        reason = error.strerror or error
        raise InvalidArgument(
            f"{folder.path}: could not be written ({reason}); make room and give the same command to go on"
        ) from error
    return _signed(folder, key)


def _signed(folder: Folder, key: Any) -> Folder:
    if key is not None:
        verify.refuse_lies(folder.path)
        signing.sign(folder.path, key)
    return folder


def _train(folder: Folder, plan: RunPlan, opened: Opened, receipt: Receipt, progress: Progress, quiet: bool) -> None:
    """Every step after the charge; what was drawn before is read back, not drawn again."""
    settings, architecture = plan.settings, plan.architecture
    if plan.bounds is not None and not folder.has(_BOUNDS):
        receipt.covers(plan.bounds)
        folder.write(_BOUNDS, dict(opened.find()))
    material = _looked_at(opened, folder.read(_BOUNDS) if plan.bounds is not None else {}, receipt)
    with progress("features") as shown:
        features = architecture.features(material.inputs, shown)
    if architecture.whitened:
        architecture, features = whitened.prepare(
            folder, settings, architecture, features, opened.units, receipt, held=plan.held
        )
    where = (folder, settings, material, architecture, features, receipt)
    match plan.method:
        case by_pate.Labelling() as labelling:
            learned = by_pate.learn(labelling, *where, progress=progress)
        case by_release.Releasing() as releasing:
            learned = by_release.learn(releasing, *where)
        case tuning.Tuning() as tuned:
            learned = tuning.learn(tuned, *where, quiet=quiet)
        case by_sgd.Training() as training:
            learned = by_sgd.learn(training, *where, quiet=quiet)
    if architecture.whitened:
        learned = replace(learned, facts=learned.facts | whitened.facts(settings, opened.units))
    _keep(folder, plan, receipt, material, architecture, learned, features)
    tuning.forget(folder)


def _looked_at(opened: Opened, found: bounds.Found, receipt: Receipt) -> Material:
    """The rows. What is wrong with their values is said after the charge: before, it would be an answer for free."""
    try:
        return opened.look(found)
    except InvalidArgument as error:
        if receipt.account is None:
            raise
        raise InvalidArgument(f"{error}; the run is charged already: mend that and give the same command") from None


def _keep(
    folder: Folder,
    plan: RunPlan,
    receipt: Receipt,
    material: Material,
    architecture: Architecture,
    learned: Learned,
    features: Tensor,
) -> None:
    learned.module.eval()
    trained.save(folder, architecture, learned.module, material.classes, material.schema)
    folder.write(PRIVACY, claim(plan, receipt, learned))
    if learned.scores is not None and learned.included is not None:
        audit_files.write_canaries(folder.path, learned.scores, learned.included)
    if learned.gradients is not None:
        audit_files.write_gradients(folder.path, *learned.gradients)
    folder.write(RESULTS, _results(plan.settings, material, architecture, learned, features))
    folder.write(EVENTS, folder.read(PRIVACY)["events"])
    pages.write_card(folder)
    manifest.write(folder.path)
    finish(folder.path / RECEIPT)


def claim(plan: RunPlan, receipt: Receipt, learned: Learned) -> dict[str, Any]:
    """What privacy.json says."""
    event, delta = plan.event, plan.budget.delta
    found = accounting.bounds(event, delta=delta)
    return {
        "epsilon": plan.epsilon,
        "delta": delta,
        "epsilon_certified": {"lower": found.lower, "upper": min(found.upper, plan.epsilon)},
        "weak_guarantee": plan.weakness or None,
        "unit": settled_unit(event).value,
        "neighbours": settled_neighbours(event).value,
        "method": plan.name,
        **learned.facts,
        "generator": plan.generator,
        "reproducible_noise_for_tests_only": is_reproducible(event),
        "ledger": None if receipt.account is None else receipt.record(),
        "made": receipt.at[:10],
        "inputs_fingerprint": plan.fingerprint,
        "public_facts": _public_facts(plan),
        "versions": _versions(),
        "events": {"terrine-events": 1, "event": to_dict(event)},
    }


def _public_facts(plan: RunPlan) -> str:
    """What the claim takes as known, and what of it was taken from the rows all the same."""
    count = "rows" if plan.settings.person is None else "people"
    known = f"the number of {count}, the schema and the names of the classes count as public"
    if not plan.guessed:
        return known
    return (
        f"{known}; but some of its facts were GUESSED FROM THE PRIVATE ROWS and accepted as they were, which the claim "
        f"does not cover: those of {check.printable(', '.join(plan.guessed))}"
    )


def _results(
    settings: Settings, material: Material, architecture: Architecture, learned: Learned, features: Tensor
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "data": material.name,
        "model": architecture.name,
        "classes": len(material.classes),
        "accuracy": None,
        "majority": None,
        "parameters": sum(one.numel() for one in learned.module.parameters()),
    }
    if material.target is not None:
        record["target"] = {"low": material.target.low, "high": material.target.high}
    if learned.accuracy is not None:
        return record | learned.accuracy
    if material.test is None:
        return record | {"measured_on": f"nothing: {_unmeasured(settings)}"}
    labels, tested = material.test[1], architecture.features(material.test[0])
    if material.target is not None:
        found = measuring.public(learned.module, tested, labels, material)
        where = f"public rows in {check.printable(str(settings.test))}, which needs no protection"
        return record | found | {"rows": len(labels), "measured_on": where}
    counts = np.bincount(labels, minlength=len(material.classes))
    where = "the published test set" if material.published else f"public rows in {check.printable(str(settings.test))}"
    shown = None
    if material.published:  # otherwise its accuracy would tell about private rows
        shown = _accuracy(baseline.unsafe_train(architecture, features, material.labels), tested, labels)
    return record | {
        "accuracy": _accuracy(learned.module, tested, labels),
        "non_private": shown,
        "majority": float(counts.max() / counts.sum()),
        "rows": len(labels),
        "measured_on": f"{where}, which needs no protection",
    }


def _unmeasured(settings: Settings) -> str:
    if settings.accuracy_within == 0 or settings.method == "pate":
        return "no public test rows were given and no budget was set aside"
    within = f"{settings.accuracy_within or recipes.WITHIN:g}"
    return f"no public test rows were given, and these are too few private ones for an accuracy within {within} points"


def _accuracy(module: nn.Module, features: Tensor, labels: Integers) -> float:
    with torch.no_grad():
        told = torch.cat([module(part).argmax(dim=1) for part in torch.split(features, 1000)]).numpy()
    return float((told == labels).mean())


def _versions() -> dict[str, str]:
    found = {"terrine": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "scipy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
