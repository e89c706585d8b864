"""`terrine train`, `predict` and `report`: from a private table to a trained, billed and audited model."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from terrine import files
from terrine.cli.charging import NOWHERE, AccountName, By, LedgerUrl, Purpose, Weak, charging
from terrine.cli.interrupted import explained
from terrine.cli.progress import counted
from terrine.cli.schema import Encoding, Separator, TableName, TextModel
from terrine.errors import InvalidArgument
from terrine.rounding import up

if TYPE_CHECKING:
    from terrine.pipeline import Folder
    from terrine.pipeline.planning import RunPlan

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def train(
    epsilon: Annotated[
        float, typer.Option(help="The most that may be learned about one row; with --person, one person.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the run; an interrupted run's folder goes on.")],
    table: Annotated[
        str | None, typer.Argument(help="A private table: a file, a folder, a pattern, file.db::table.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    data: Annotated[str | None, typer.Option(help="Or a named set: digits, mnist, fashion-mnist, ...")] = None,
    schema: Annotated[str | None, typer.Option(help="The table's public facts; else TABLE.schema.toml.")] = None,
    table_name: TableName = None,
    text_model: TextModel = None,
    person: Annotated[
        str | None, typer.Option(help="The column that says whose a row is: people are protected, not rows.")
    ] = None,
    rows_per_person: Annotated[
        int | None, typer.Option(help="How many rows of a person count at a time; default 10.")
    ] = None,
    test: Annotated[str | None, typer.Option(help="A table that needs no protection, to measure accuracy.")] = None,
    public: Annotated[str | None, typer.Option(help="pate: a table of public rows for the student.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: a power of ten below 1/rows.")] = None,
    method: Annotated[str, typer.Option(help="sgd or pate.")] = "sgd",
    model: Annotated[
        str | None,
        typer.Option(help="linear, mlp; least-squares (one release); images: scatter-linear, scatter-cnn, cnn."),
    ] = None,
    lot: Annotated[int | None, typer.Option(help="sgd: expected examples, or people, in a lot; all at most.")] = None,
    epochs: Annotated[float | None, typer.Option(help="sgd: passes over the data.")] = None,
    clip: Annotated[float | None, typer.Option(help="sgd: the bound on one example's, or person's, gradient.")] = None,
    loss: Annotated[str | None, typer.Option(help="A label that is a number: squared or absolute error.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="sgd: the learning rate.")] = None,
    device: Annotated[str | None, typer.Option(help="sgd: where to train: cpu, cuda, mps.")] = None,
    tune: Annotated[
        int | None, typer.Option(help="sgd: the best of about so many runs, drawn at random; all of it is billed.")
    ] = None,
    teachers: Annotated[int | None, typer.Option(help="pate: how many teachers.")] = None,
    queries: Annotated[int | None, typer.Option(help="pate: how many labels are bought.")] = None,
    private_bounds: Annotated[
        bool, typer.Option("--private-bounds", help="Spend a tenth of epsilon on bounds that are not confirmed.")
    ] = False,
    accuracy_within: Annotated[
        float | None,
        typer.Option(help="Points that an accuracy without --test may be off; default 2, 0: no accuracy."),
    ] = None,
    audit: Annotated[int | None, typer.Option(help="Rows, or people, left to coins for the audit; 0: none.")] = None,
    gradient_canaries: Annotated[
        int | None, typer.Option(help="Audit a twin, too, with so many gradient canaries; takes a second training.")
    ] = None,
    weak_guarantee: Weak = False,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    sign: Annotated[str | None, typer.Option(help="Sign the manifest with this private key.")] = None,
    seed: Annotated[int | None, typer.Option(help="For tests only: seeded noise, NOT private.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train on private data at a certified epsilon; the folder holds model, claim, report and audit."""
    from terrine import pipeline, tables

    settings = pipeline.Settings(
        epsilon=epsilon, data=data, table=None if table is None else tables.named(table, table_name), label=label,
        schema=schema, text_model=text_model, person=person,
        rows_per_person=rows_per_person, test=test, public=public, delta=delta,
        method=method, model=model, lot=lot, epochs=epochs, clip=clip, learning_rate=learning_rate,
        loss=loss, accuracy_within=accuracy_within,
        device=device, tune=tune, teachers=teachers, queries=queries, private_bounds=private_bounds, audit=audit,
        gradient_canaries=gradient_canaries,
        weak_guarantee=weak_guarantee, seed=seed,
    )  # fmt: skip
    finished = pipeline.Folder(out).done
    with explained(out, "terrine train"):
        with charging(ledger, account, by=by, purpose=purpose, usual="terrine train") as charged:
            folder = pipeline.train(
                settings, out, **charged.told, head=charged.head(quiet=as_json),
                progress=functools.partial(counted, quiet=as_json), quiet=as_json, sign=sign,
                said=functools.partial(_forewarned, quiet=as_json, counted=charged.account is not None),
            )  # fmt: skip
        if not finished or not folder.has("report.html"):
            write_report(folder)
        summarise(folder, finished, as_json)


def _forewarned(plan: RunPlan, quiet: bool, counted: bool) -> None:
    """Say before the training that it is counted nowhere, or that no accuracy will be printed, and what would help."""
    if not counted and not quiet:
        typer.echo(f"{NOWHERE} this run to a budget", err=True)
    if plan.unmeasured and not quiet:
        within = plan.settings.accuracy_within or 2.0
        typer.echo(
            f"no accuracy will be measured within {within:g} points: {plan.unmeasured}; --accuracy-within takes "
            "a wider one, --test public rows",
            err=True,
        )


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished terrine train, or what was handed on of it.")],
    table: Annotated[str, typer.Argument(help="New rows: a table as train reads them, or an .npy array of inputs.")],
    out: Annotated[Path | None, typer.Option(help="Write a CSV here instead of to the terminal.")] = None,
    probabilities: Annotated[bool, typer.Option(help="Also the probability of each class.")] = False,
    keep: Annotated[
        list[str] | None, typer.Option(help="A column to copy beside the prediction; may be given often.")
    ] = None,
    table_name: TableName = None,
    encoding: Encoding = None,
    separator: Separator = None,
    text_model: TextModel = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Classes of new rows, or numbers, as CSV. Predicting costs no privacy."""
    from terrine import pipeline, tables
    from terrine.pipeline import predicting

    if out is not None:
        _may_be_written(out, table, force)
    model = pipeline.load(run)
    encoder = None if text_model is None else tables.load_encoder(text_model)
    if table.endswith(".npy"):
        rows: Any = predicting.array(table)
    else:
        where = tables.named(table, table_name)
        rows = predicting.opened(model, where, encoding=encoding, separator=separator)
    lines = predicting.lines(model, rows, keep=keep or (), probabilities=probabilities, encoder=encoder)
    header = next(lines)  # whatever is wrong with the columns is said before a file is made
    with contextlib.ExitStack() as stack:
        file = sys.stdout if out is None else stack.enter_context(written_text(out))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)


def _may_be_written(out: Path, table: str, force: bool) -> None:
    """Refuse to write over the rows, and over another file unless that was said.

    Raises:
        InvalidArgument: something is there, or no folder for it.
    """
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out {out}: there is no folder {out.parent}; want one that is there")
    if not out.exists():
        return
    from terrine import tables

    read = tables.sources.split(table)[0]
    if read.exists() and out.samefile(read):
        raise InvalidArgument(f"--out {out}: is the table itself; want another name")
    if not force:
        raise InvalidArgument(f"--out {out}: is there already; want --force to write over it, or another name")


@contextlib.contextmanager
def written_text(path: Path) -> Iterator[IO[str]]:
    """A text file for its owner, whole or not there: it holds what was kept of the rows."""
    with files.written(path, private=True) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        yield text
        text.flush()
        text.detach()


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a finished terrine train.")],
) -> None:
    """Verify a run, and write its report again."""
    from terrine import pipeline, verify

    folder = pipeline.Folder(run)
    if not folder.done:
        raise InvalidArgument(f"{run}: not a finished run; want the folder of a finished terrine train")
    verify.refuse_lies(run)
    write_report(folder)
    typer.echo(f"{folder.path / 'report.html'}")


def write_report(folder: Folder) -> None:
    """Write report and model card."""
    from terrine.pipeline import pages

    pages.write(folder)


def summarise(folder: Folder, finished: bool, as_json: bool) -> None:
    """Print what a run came to."""
    privacy, results = folder.read("privacy.json"), folder.read("results.json")
    if as_json:
        short = {name: value for name, value in privacy.items() if name != "events"}
        typer.echo(json.dumps({"out": str(folder.path), "finished_before": finished, **short, "results": results}))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if finished:
        console.print(f"{folder.path} holds this run, finished: nothing was trained or charged.")
    console.print(
        Text(f"epsilon {up(privacy['epsilon'])}", "bold")
        + f" at delta {privacy['delta']:g}, certified, for one {privacy['unit']} ({privacy['neighbours']}), "
        f"by {privacy['method']}"
    )
    if privacy["weak_guarantee"]:
        console.print(Text("a weak guarantee:", "bold red") + f" {privacy['weak_guarantee']}")
    if results.get("target") is not None and "mean_absolute_error" in results:
        console.print(_of_number(results))
    elif results["accuracy"] is not None:
        console.print(f"accuracy {100 * results['accuracy']:.2f}%{_unsure(results)} on {results['measured_on']}")
    else:
        console.print(f"accuracy measured on {results['measured_on']}")
    if privacy["reproducible_noise_for_tests_only"]:
        console.print(Text("the noise came from a seed: for tests only, NOT private", "bold red"))
    console.print(f"report: {folder.path / 'report.html'}    audit: terrine audit run {folder.path}")


def _of_number(results: dict[str, Any]) -> str:
    """How good predictions of a number are."""
    off, r2 = results.get("off_by_at_most"), results["r2"]
    unsure = "" if off is None else f" (95% sure to be off by at most {up(off, 3)})"
    explained = "not known" if r2 is None else f"{r2:.3f}"
    return (
        f"mean absolute error {results['mean_absolute_error']:.4g}{unsure}, R2 {explained}, on {results['measured_on']}"
    )


def _unsure(results: dict[str, Any]) -> str:
    """How far a noisy accuracy may be off, in per cent."""
    off = results.get("off_by_at_most")
    return "" if off is None else f" (95% sure to be off by at most {up(100 * off, 3)})"
