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

from terrine import __version__, accounting, check
from terrine.audit import folder as audit_files
from terrine.errors import InvalidArgument
from terrine.events import is_reproducible, settled_neighbours, settled_unit
from terrine.events.codec import to_dict
from terrine.runs import baseline, by_pate, by_sgd, recipes, trained, tuning, whitened
from terrine.runs.folder import PRIVACY, RESULTS, Folder
from terrine.runs.learned import Learned
from terrine.runs.material import Integers, Material, gather
from terrine.runs.models import Architecture
from terrine.runs.settings import Settings

Progress = Callable[[str], Any]
_BOUNDS = "owner/bounds.json"


@contextlib.contextmanager
def _silent(_title: str) -> Any:
    yield None


def train(
    settings: Settings,
    out: str | Path,
    *,
    account: Any = None,
    progress: Progress = _silent,
    quiet: bool = True,
) -> Folder:
    """Train as the settings say, into the folder `out`; a run that is over is left as it is.

    Guarantee: the model, privacy.json, results.json and the model card cost at most the event in privacy.json, which
    the account is charged for before training. The report and audit/ hold the audit's findings about private rows:
    they are for the data owner.

    Raises:
        InvalidArgument: the data, the settings or the folder do not fit.
        BudgetExceeded: the account has not enough left; nothing was trained.
    """
    folder = Folder(out)
    material = gather(settings, folder.read(_BOUNDS) if folder.has(_BOUNDS) else None)
    check_material(material)
    architecture = _architecture(settings, material)
    folder.begin(settings)
    try:
        _train(folder, settings, material, architecture, account, progress, quiet)
    except OSError as error:
        reason = error.strerror or error
        raise InvalidArgument(
            f"{folder.path}: could not be written ({reason}); make room and give the same command to go on"
        ) from error
    return folder


def _train(
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    account: Any,
    progress: Progress,
    quiet: bool,
) -> None:
    if material.found is not None and not folder.has(_BOUNDS):
        folder.write(_BOUNDS, dict(material.found))
    if folder.done:
        tuning.forget(folder)
        return
    with progress("features") as shown:
        features = architecture.features(material.inputs, shown)
    if architecture.whitened:
        architecture, features = whitened.prepare(folder, settings, architecture, features)
        material = replace(material, preparation=(*material.preparation, *architecture.cost))
    if settings.method == "pate":
        learned = by_pate.learn(folder, settings, material, architecture, features, account, progress=progress)
    else:
        way = by_sgd.learn if settings.tune is None else tuning.learn
        learned = way(folder, settings, material, architecture, features, account, quiet=quiet)
    if architecture.whitened:
        learned = replace(learned, facts=learned.facts | whitened.facts(settings, len(features)))
    _keep(folder, settings, material, architecture, learned, features)
    tuning.forget(folder)


def check_material(material: Material) -> None:
    """Refuse rows that nothing can be learned from."""
    if len(material.labels) < 10:
        raise check.refuse("rows", len(material.labels), "at least 10 private rows")
    if not np.isfinite(material.inputs).all():
        raise check.refuse("inputs", "values that are not finite", "numbers")


def _keep(
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    learned: Learned,
    features: Tensor,
) -> None:
    learned.module.eval()
    trained.save(folder, architecture, learned.module, material.classes, material.schema)
    folder.write(PRIVACY, claim(learned, settings))
    if learned.scores is not None and learned.included is not None:
        audit_files.write_canaries(folder.path, learned.scores, learned.included)
    folder.write(RESULTS, _results(settings, material, architecture, learned, features))


def claim(learned: Learned, settings: Settings) -> dict[str, Any]:
    """What privacy.json says."""
    found = accounting.bounds(learned.event, delta=learned.delta)
    seeded = is_reproducible(learned.event)
    return {
        "epsilon": learned.epsilon,
        "delta": learned.delta,
        "epsilon_certified": {"lower": found.lower, "upper": min(found.upper, learned.epsilon)},
        "unit": settled_unit(learned.event).value,
        "neighbours": settled_neighbours(learned.event).value,
        "method": {"sgd": "DP-SGD", "pate": "PATE"}[settings.method],
        **learned.facts,
        "generator": "SEEDED, FOR TESTS ONLY: not private" if seeded else "operating system (and ChaCha20 from it)",
        "reproducible_noise_for_tests_only": seeded,
        "public_facts": "the number of rows, the schema and the names of the classes count as public",
        "versions": _versions(),
        "events": {"terrine-events": 1, "event": to_dict(learned.event)},
    }


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
    if learned.accuracy is not None:
        return record | learned.accuracy
    if material.test is None:
        return record | {"measured_on": "nothing: no public test rows were given and no budget was set aside"}
    labels, tested = material.test[1], architecture.features(material.test[0])
    counts = np.bincount(labels, minlength=len(material.classes))
    where = "the published test set" if material.published else f"public rows in {settings.test}"
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


def _accuracy(module: nn.Module, features: Tensor, labels: Integers) -> float:
    with torch.no_grad():
        told = torch.cat([module(part).argmax(dim=1) for part in torch.split(features, 1000)]).numpy()
    return float((told == labels).mean())


def _architecture(settings: Settings, material: Material) -> Architecture:
    """The model asked for, or the usual one."""
    shape = material.shape
    name = settings.model or ("linear" if len(shape) == 1 else "scatter-linear")
    whitens = recipes.whitens(settings, name, shape, len(material.labels))
    return Architecture(name, shape, len(material.classes), whitened=whitens)


def _versions() -> dict[str, str]:
    found = {"terrine": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "scipy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
