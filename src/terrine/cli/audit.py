"""`terrine audit`: attack scores or canaries beside a claim; exit code 1 where the claim does not stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine.errors import InvalidArgument

if TYPE_CHECKING:
    from terrine.audit import Evidence, Scores, Verdict
    from terrine.audit.metrics import MetricInterval
    from terrine.events import Budget

app = typer.Typer(
    name="audit",
    help="Attack what was released, and put the attack's lower bound beside the claim.",
    no_args_is_help=True,
)

Confidence = Annotated[float, typer.Option(help="How surely the lower bound must hold.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the ROC curve into this picture, log-log.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("scores")
def scores(
    members: Annotated[Path, typer.Argument(help="Scores of those who were in the data: .npy, or one to a line.")],
    non_members: Annotated[Path, typer.Argument(help="Scores of those who were not.")],
    delta: Annotated[float, typer.Option(help="The delta of the claim.")],
    claim_epsilon: Annotated[float | None, typer.Option(help="The claimed epsilon; without, only bounds.")] = None,
    confidence: Confidence = 0.95,
    one_run: Annotated[
        bool,
        typer.Option(
            "--one-run", help="All scores come from one trained model, and a fair coin put each example in or out."
        ),
    ] = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Bound epsilon from below by an attack's scores (higher: likelier a member); exit 1 if the claim is VIOLATED."""
    from terrine import audit, check
    from terrine.audit.folder import load_scores
    from terrine.events import Budget

    found = audit.Scores(load_scores("members", members), load_scores("non_members", non_members))
    delta = check.half_open_unit("delta", delta)
    claim = None if claim_epsilon is None else Budget(check.positive("claim-epsilon", claim_epsilon), delta)
    record = _judged(found, _evidence(found, delta, confidence, one_run), delta, claim)
    _finish(record, found, claim, plot, as_json)


@app.command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="The folder of a training made by terrine.")],
    confidence: Confidence = 0.95,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Audit a training by what its folder holds: canaries, scores, and the claim; exit 1 if it is VIOLATED."""
    from terrine.audit import Scores, bound, one_run
    from terrine.audit.folder import read
    from terrine.verify.manifest import MANIFEST

    if not folder.is_dir():
        raise InvalidArgument(f"{folder}: not a folder; want the folder of a training made by terrine")
    if (folder / MANIFEST).is_file():  # folders that are made by hand, for scores of one's own, have none
        _refuse_lies(folder)
    held = read(folder)
    coins = {"canaries": held.canaries, "gradient canaries of a twin": held.gradients}
    kept = {name: pair for name, pair in coins.items() if pair is not None}
    sure = 1 - (1 - confidence) / (len(kept) + (held.scores is not None))  # audits of one claim share the error
    found: dict[str, tuple[Scores, Evidence]] = {
        name: (Scores.split(*pair), one_run.guess(*pair, confidence=sure)) for name, pair in kept.items()
    }
    if held.scores is not None:
        found["scores"] = held.scores, bound(held.scores, delta=held.claim.delta, confidence=sure)
    records = [{"evidence": name, **_judged(*one, held.claim.delta, held.claim)} for name, one in found.items()]
    record = max(records, key=lambda one: one["epsilon_lower_bound"])
    drawn = found[record["evidence"]][0]
    if len(records) > 1:
        record = {**record, "audits": records}
    _finish(record, drawn, held.claim, plot, as_json)


def _refuse_lies(folder: Path) -> None:
    """Refuse a folder that lies; a claim that the audit itself refutes is judged below."""
    from terrine.verify import verify

    if lie := next((one for one in verify(folder).checks if not one.ok and one.name not in ("seed", "audit")), None):
        raise InvalidArgument(f"{folder}: does not verify: {lie.name}: {lie.detail}; terrine verify {folder} says more")


def _evidence(found: Scores, delta: float, confidence: float, one_run: bool) -> Evidence:
    import numpy as np

    from terrine.audit import bound
    from terrine.audit.one_run import guess

    if not one_run:
        return bound(found, delta=delta, confidence=confidence)
    flags = np.repeat([True, False], [found.members.size, found.non_members.size])
    return guess(np.concatenate([found.members, found.non_members]), flags, confidence=confidence)


def _judged(found: Scores, evidence: Evidence, delta: float, claim: Budget | None) -> dict[str, Any]:
    from terrine import audit

    described = audit.summary(found)
    record: dict[str, Any] = {
        "epsilon_lower_bound": evidence.epsilon_at(delta),
        "delta": delta,
        "confidence": evidence.confidence,
        "method": "clopper-pearson" if isinstance(evidence, audit.Rates) else "one-run",
        "members": found.members.size,
        "non_members": found.non_members.size,
        "auc": _interval(described.auc),
        "tpr_at_fpr_0.01": _interval(described.at_one_percent),
        "tpr_at_fpr_0.001": _interval(described.at_one_in_thousand),
        "balanced_accuracy": _interval(described.balanced_accuracy),
    }
    if isinstance(evidence, audit.Rates | audit.OneRun) and delta > 0:
        record["gaussian_mu_lower_bound"] = evidence.mu()
        record["gaussian_epsilon"] = evidence.gaussian(delta)
    if claim is not None:
        judged: Verdict = audit.verdict(claim, evidence)
        record |= {
            "claim_epsilon": claim.epsilon,
            "verdict": "VIOLATED" if judged.violated else "consistent",
            "violated": judged.violated,
            "text": str(judged),
        }
    return record


def _interval(metric: MetricInterval) -> dict[str, float]:
    return {"value": metric.value, "low": metric.low, "high": metric.high}


def _finish(record: dict[str, Any], found: Scores, claim: Budget | None, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        _draw(found, claim, plot)
        record["plot"] = str(plot)
    if as_json:
        typer.echo(json.dumps(record, allow_nan=False))
    else:
        _print(record)
    if record.get("violated"):
        raise typer.Exit(1)


def _draw(found: Scores, claim: Budget | None, to: Path) -> None:
    from terrine.audit import roc
    from terrine.report.roc import draw_roc

    curve = roc(found)
    draw_roc(
        curve.false_positive_rate,
        curve.true_positive_rate,
        claim=None if claim is None else (claim.epsilon, claim.delta),
        smallest=min(1e-3, 1 / max(found.members.size, found.non_members.size)),
        title=f"{found.members.size:,} members, {found.non_members.size:,} non-members: area {curve.auc():.3f}",
        to=to,
    )


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    table = Table("the attack", "value", "95% bootstrap interval")
    names = {"auc": "area under ROC", "balanced_accuracy": "balanced accuracy (best threshold)"}
    names |= {"tpr_at_fpr_0.01": "true positives at 1% false", "tpr_at_fpr_0.001": "true positives at 0.1% false"}
    for key, name in names.items():
        one = record[key]
        table.add_row(name, f"{one['value']:.4f}", f"{one['low']:.4f} to {one['high']:.4f}")
    console.print(table)
    sure = f"confidence {100 * record['confidence']:g}%, {record['method']}"
    console.print(
        f"epsilon is at least [bold]{record['epsilon_lower_bound']:.4g}[/bold] at delta {record['delta']:g} ({sure})"
    )
    if "gaussian_epsilon" in record:
        console.print(
            f"read as a Gaussian mechanism: mu at least {record['gaussian_mu_lower_bound']:.4g}, "
            f"epsilon {record['gaussian_epsilon']:.4g}"
        )
    if "violated" in record:
        console.print(record["text"], style=f"bold {'red' if record['violated'] else 'green'}", markup=False)
    if "plot" in record:
        console.print(f"ROC curve: {record['plot']}", markup=False)
