"""A run's report and model card, written from what its folder holds."""

from __future__ import annotations

import json
import shlex
from typing import Any

import numpy as np

from terrine.audit import Scores, one_run, roc, verdict
from terrine.audit import folder as audit_files
from terrine.events import Event
from terrine.events.codec import from_dict
from terrine.pipeline.folder import ASKED, CARD, PRIVACY, RECEIPT, REPORT, RESULTS, Folder
from terrine.report import accountants, card, figures, review
from terrine.report.page import render, style_sheet
from terrine.rounding import down, up

_KEYS = {
    "unit": "protected unit",
    "neighbours": "neighbours",
    "sampler": "sampler",
    "clients": "clients",
    "examples": "private examples",
    "people": "private people",
    "rows_per_person": "rows of a person that count at a time",
    "contribution": "what a person adds",
    "sums": "sums",
    "lot": "expected lot",
    "rate": "sampling rate",
    "steps": "steps",
    "noise": "noise multiplier",
    "clip": "clipping bound",
    "learning_rate": "learning rate",
    "features": "features of a row",
    "released_numbers": "numbers released",
    "sensitivity": "sensitivity",
    "ridge": "ridge, chosen from the release",
    "whitening": "preparation",
    "tuning": "tuning",
    "canaries": "canaries of the audit",
    "teachers": "teachers",
    "queries": "labels bought",
    "public_inputs": "public inputs of the student",
    "generator": "random generator",
}


def write_card(folder: Folder) -> None:
    """Write model_card.md."""
    folder.write_text(CARD, card.text(folder.read(PRIVACY), folder.read(RESULTS)))


def write(folder: Folder) -> None:
    """Write report.html."""
    privacy, results = folder.read(PRIVACY), folder.read(RESULTS)
    event, curve = from_dict(privacy["events"]["event"]), card.curve(privacy)
    said = card.shared(privacy, results, curve)
    folder.write_text(REPORT, render("run.html", said | _shown(folder, privacy, said["words"], event, curve)))


def audited(folder: Folder, *, confidence: float = 0.95) -> dict[str, Any] | None:
    """What the run's audit found; None where there was none. It tells about private rows."""
    if not folder.has("audit/canaries.npy"):
        return None
    held = audit_files.read(folder.path)
    assert held.canaries is not None
    evidence = one_run.guess(*held.canaries, confidence=confidence)
    found = verdict(held.claim, evidence)
    privacy = folder.read(PRIVACY)
    pairs = privacy["method"] == "PATE"
    noun = {"person": "people", "client": "clients"}.get(privacy["unit"], "rows")
    curve = roc(Scores.split(*held.canaries)) if 0 < held.canaries[1].sum() < len(held.canaries[1]) else None
    return {
        "rows": len(held.canaries[1]),
        "what": f"pairs of mislabelled private {noun}, one of each," if pairs else f"mislabelled private {noun}",
        "lower": found.bound,
        "confidence": confidence,
        "verdict": "VIOLATED" if found.violated else "consistent with the claim",
        "violated": found.violated,
        "curve": None if curve is None else (curve.false_positive_rate, curve.true_positive_rate),
    }


def command(asked: dict[str, Any]) -> str:
    """The command that asks for this run."""
    words = [*asked.get("command", "terrine train").split(), *([asked["table"]] if asked.get("table") else [])]
    for name, value in asked.items():
        if name in ("command", "delta_at_most"):
            continue
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False and name != "table" and not (name == "method" and value == "sgd"):
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(shlex.quote(word) for word in [*words, "--out", "run/"])


def _shown(folder: Folder, privacy: Any, words: str, event: Event, curve: Any) -> dict[str, Any]:
    from markupsafe import Markup

    shares, curves = accountants.over_training(event, privacy["delta"])
    whole = privacy.get("steps") or privacy.get("queries") or 1
    unit = "steps" if "steps" in privacy else "answers"
    audit, rates, results = audited(folder), np.linspace(0, 1, 401), folder.read(RESULTS)
    bars = _bars(results)
    receipt = folder.read(RECEIPT) if folder.has(RECEIPT) else {}
    return {
        "style": Markup(style_sheet()),
        "review": review.full(privacy, receipt, words),
        "facts": _facts(privacy),
        "epsilon_figure": Markup(figures.epsilon_over_training([share * whole for share in shares], curves, unit=unit))
        if privacy["method"] != "one release"
        else None,
        "progress_unit": unit,
        "trade_figure": Markup(
            figures.trade_off(
                rates,
                curve.true_positive_rate(rates),
                audit["curve"] if audit else None,
                epsilon=privacy["epsilon"],
                delta=privacy["delta"],
            )
        ),
        "audit": audit,
        "accuracy_figure": Markup(figures.bars(bars)) if bars else None,
        "accuracy_notes": _notes(results),
        "hidden": _hidden(privacy),
        "enclosed": _enclosed(privacy["epsilon_certified"]),
        "events": json.dumps(privacy["events"], indent=2),
        "command": command(folder.read(ASKED)),
        "reproduce": "The command makes a run of the same plan and cost. Its noise is fresh, as it must be, so the "
        "model differs; no seed exists that would give this one again."
        if not privacy["reproducible_noise_for_tests_only"]
        else "The command with its seed makes the same model again, which is why it is not private.",
    }


def _enclosed(found: dict[str, float]) -> str:
    """Where the true epsilon lies, in as many digits as tell the two ends apart."""
    lower, upper = float(found["lower"]), float(found["upper"])
    for digits in range(3, 13):
        low, high = f"{lower:.{digits}g}", str(up(upper, digits))
        if low != high:
            return f"The true epsilon at the end lies between {down(lower, digits)} and {high}."
    return f"The bound is exact: the true epsilon at the end is {up(upper)}."


def _facts(privacy: dict[str, Any]) -> list[tuple[str, str]]:
    """What was done, and where it was charged, for whoever checks the ledger."""
    facts, ledger = [(title, _plain(privacy[key])) for key, title in _KEYS.items() if key in privacy], privacy["ledger"]
    if ledger is None:
        return [*facts, ("ledger", "none: nothing adds this run's cost to that of others on the same data")]
    return [*facts, ("ledger charge", str(ledger["charge"])), ("ledger head after it", str(ledger["head"]))]


def _bars(results: dict[str, Any]) -> dict[str, float]:
    named = {
        "this model": results["accuracy"],
        "not private": results.get("non_private"),
        "commonest class": results["majority"],
    }
    return (
        {name: share for name, share in named.items() if share is not None} if results["accuracy"] is not None else {}
    )


def _notes(results: dict[str, Any]) -> list[str]:
    notes = []
    if results.get("non_private") is None:
        notes.append(
            "No non-private model is shown beside it: its accuracy would be learned from the private rows and has not "
            "been paid for."
        )
    else:
        notes.append(
            "The non-private model was trained on the same rows: a published data set, or it could not be shown."
        )
    if results["majority"] is None and results["accuracy"] is not None:
        notes.append("The share of the commonest class is not shown: it would be one more look at the private rows.")
    return notes


def _hidden(privacy: dict[str, Any]) -> list[str]:
    if privacy["method"] == "PATE":
        return [
            "The teachers' votes and their gaps: private data cast them. terrine pate draws them for the owner.",
            "The vote-dependent cost: it is data as well. The claim above holds whatever the votes were.",
        ]
    if privacy["method"] == "one release":
        return [
            "The sums without noise, and how many rows were scaled or cut: they were not released by the plan.",
            "The noise: forgotten when the run was over. The noisy sums themselves stay with the owner.",
        ]
    return [
        "How many gradients were clipped, and training losses: they were not released by the plan.",
        "Lots and noise, and the key that they were drawn from: forgotten when the run was over.",
    ]


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
