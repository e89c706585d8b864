"""`terrine pate`: a run folder, step by step, or the whole of it from one file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from terrine.cli.charging import AccountName, By, LedgerUrl, Purpose, Weak, charging
from terrine.cli.progress import counted
from terrine.errors import InvalidArgument

app = typer.Typer(
    name="pate",
    help="Teachers on disjoint parts of private data vote; noisy answers teach a public student.",
    no_args_is_help=True,
)

_RULES = "laplace, gaussian, confident, interactive, stable, subsample or sparse."

Folder = Annotated[Path, typer.Option("--run", help="The run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Seed = Annotated[int | None, typer.Option("--seed", help="For tests only: seeded noise, NOT private.")]


@app.command()
def split(
    run: Folder,
    data: Annotated[str, typer.Option(help="An .npz file with x, y (and groups), or mnist, digits, adult, ...")],
    teachers: Annotated[int, typer.Option(help="How many teachers.")],
    classes: Annotated[int, typer.Option(help="How many classes; public.")] = 10,
    seed: Annotated[
        int | None,
        typer.Option(help="A public seed for the deal (0 if left out); with --rate for tests only, NOT private."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Let each teacher draw examples at this rate, in secret: for --aggregator subsample."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Deal the private examples (or people, if the data has groups) to teachers."""
    from terrine.pate.data import Data
    from terrine.pate.run import RunFolder

    deal = RunFolder(run).split(Data.read(data), source=data, teachers=teachers, classes=classes, seed=seed, rate=rate)
    record = deal.record()
    _show({name: record[name] for name in ("kind", "teachers", "unit", "most_parts", "digest")}, as_json)


@app.command()
def train(
    run: Folder,
    data: Annotated[str, typer.Option(help="The data that was split.")],
    model: Annotated[str, typer.Option(help="network, logistic, forest or boosting.")] = "network",
    epochs: Annotated[int, typer.Option(help="Epochs of a network.")] = 40,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    backend: Annotated[str | None, typer.Option(help="ray or dask: train on a cluster.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the teachers; started again, it goes on where it stopped."""
    from terrine.pate.data import Data
    from terrine.pate.run import RunFolder

    with counted("teachers", quiet=as_json) as progress:
        RunFolder(run).train(Data.read(data), model=model, epochs=epochs, jobs=jobs, backend=backend, progress=progress)
    _show({"trained": True, "folder": str(run / "owner" / "teachers")}, as_json)


@app.command()
def vote(
    run: Folder,
    data: Annotated[str, typer.Option(help="The data that was split.")],
    public: Annotated[str, typer.Option(help="Public inputs: an .npz file with x, or a named set.")],
    as_json: AsJson = False,
) -> None:
    """Let the trained teachers vote on public inputs. Votes stay in the owner's folder."""
    from terrine.pate.data import Data
    from terrine.pate.run import RunFolder

    here = RunFolder(run)
    record = here._read("run.json")
    if "model" not in record:
        raise InvalidArgument(f"{run} has no teachers: want terrine pate train first")
    trained = here.train(Data.read(data), model=record["model"], epochs=record["epochs"])
    votes = here.vote(trained, Data.read(public, public=True))
    _show({"queries": len(votes), "classes": votes.classes, "teachers": votes.teachers}, as_json)


@app.command()
def label(
    run: Folder,
    aggregator: Annotated[str, typer.Option(help=_RULES)] = "gaussian",
    noise: Annotated[float | None, typer.Option(help="Scale or deviation on each count, in votes.")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="confident: votes that the plurality must reach; interactive: beyond the student's."),
    ] = None,
    test_noise: Annotated[float | None, typer.Option(help="confident, interactive: deviation of that test.")] = None,
    confidence: Annotated[
        float | None, typer.Option(help="interactive: where a student's own prediction may stand (0.9).")
    ] = None,
    student: Annotated[
        Path | None, typer.Option(help="interactive: a .npy file of class probabilities, as predictions.npy of a run.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="stable, subsample, sparse: the cost of a query or of the run.")
    ] = None,
    failing: Annotated[float | None, typer.Option("--delta", help="stable, subsample, sparse: its delta.")] = None,
    unstable: Annotated[int | None, typer.Option(help="sparse: how many unstable queries are paid for.")] = None,
    queries: Annotated[int | None, typer.Option(help="Ask only the first so many.")] = None,
    most: Annotated[int | None, typer.Option(help="Stop after so many answers.")] = None,
    budget: Annotated[str | None, typer.Option(help="EPSILON,DELTA: stop before it would be exceeded.")] = None,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Answer queries with noise; this is what costs."""
    from terrine.pate.job import budget_of
    from terrine.pate.run import RunFolder

    fields = {
        "noise": noise,
        "threshold": threshold,
        "test_noise": test_noise,
        "confidence": confidence,
        "epsilon": epsilon,
        "delta": failing,
        "unstable": unstable,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    with charging(ledger, account, by=by, purpose=purpose, usual="pate: labels") as charged:
        answers = RunFolder(run).label(
            aggregator=aggregator, fields=given, student=student, queries=queries, most=most,
            budget=budget_of(budget), rng=_source(seed), **charged.told,
        )  # fmt: skip
    shown = {"asked": answers.asked, "answered": len(answers.answered), "stopped": answers.stopped}
    _show(shown | {"labels": str(run / "labels.json")}, as_json)


@app.command()
def bill(
    run: Folder,
    delta: Annotated[
        float,
        typer.Option(help="The delta to state epsilon at: for one example, or person (groups)."),
    ] = 1e-5,
    sanitise: Annotated[bool, typer.Option(help="Release the vote-dependent bill with noise, once.")] = True,
    order: Annotated[float | None, typer.Option(help="The Renyi order it is released at.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Draw epsilon against queries into this folder.")] = None,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Print what the answers cost: the data-independent epsilon and the sanitised one."""
    from terrine.pate.run import RunFolder

    with charging(ledger, account, by=by, purpose=purpose, usual="pate: sanitised bill") as charged:
        shown = RunFolder(run).bill(delta=delta, sanitise=sanitise, order=order, rng=_source(seed), **charged.told)
    if pictures is not None:
        from terrine.pate.pictures import epsilon_against_queries

        shown = shown | {"picture": str(epsilon_against_queries(RunFolder(run), delta, pictures))}
    _show({name: value for name, value in shown.items() if as_json or name != "event"}, as_json)


@app.command()
def student(
    run: Folder,
    public: Annotated[str, typer.Option(help="The public inputs, labelled ones first.")],
    model: Annotated[str, typer.Option(help="network, logistic, forest or boosting.")] = "network",
    method: Annotated[str, typer.Option(help="network: supervised, consistency, vat or gan.")] = "consistency",
    steps: Annotated[int, typer.Option(help="Training steps of a network.")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed of the student's training.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train the student on public inputs and the answers; its bill is saved beside it."""
    from terrine.pate.data import Data
    from terrine.pate.named import methods
    from terrine.pate.run import RunFolder

    if method not in methods():
        raise InvalidArgument(f"method={method!r}: want one of {', '.join(methods())}")
    with counted("student", quiet=as_json) as progress:
        _, path = RunFolder(run).student(
            Data.read(public, public=True), model=model, method=method, steps=steps, seed=seed, progress=progress
        )
    _show({"student": str(path), "bill": str(path.with_suffix(".bill.json"))}, as_json)


@app.command("run")
def whole(
    config: Annotated[Path, typer.Argument(help="A TOML file: run, data, public and a table for each step.")],
    weak_guarantee: Weak = False,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    as_json: AsJson = False,
) -> None:
    """Do every step of a run that a file describes; the whole is charged first, and what is done is not done again."""
    from terrine.pate.job import Job, carry_out
    from terrine.receipts import Payment

    record = _read_plan(config)
    with (
        charging(ledger, account, by=by, purpose=purpose, usual="terrine pate run") as charged,
        counted("pate", quiet=as_json) as progress,
    ):
        payment = Payment(**charged.told, head=charged.head(quiet=as_json))
        shown, path = carry_out(
            Job.of(record), Path(record["run"]), payment, weak_guarantee=weak_guarantee, progress=progress
        )
    _show({name: value for name, value in shown.items() if name != "event"} | {"student": str(path)}, as_json)


def _read_plan(config: Path) -> dict[str, Any]:
    try:
        plan = tomllib.loads(config.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{config}: want a TOML file ({error})") from None
    if missing := [name for name in ("run", "data", "public", "split") if name not in plan]:
        raise InvalidArgument(f"{config} lacks {', '.join(missing)}: want run, data, public and [split]")
    return plan


def _source(seed: int | None) -> Any:
    from terrine.rng import SYSTEM, Seeded

    return SYSTEM if seed is None else Seeded(seed)


def _show(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record))
        return
    width = max(len(name) for name in record)
    for name, value in record.items():
        if value not in (None, ""):
            typer.echo(f"{name.replace('_', ' '):<{width}}  {value}")
