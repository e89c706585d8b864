"""`terrine demo`: the whole story, offline."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine.cli.progress import counted

if TYPE_CHECKING:
    from terrine.pipeline.demo import DemoResult


def demo(
    out: Annotated[Path, typer.Option(help="Where runs and the page go.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """An attack with and without privacy, one ledger for a query and a training, a forged claim: OUT/report.html."""
    from terrine.pipeline.demo import demonstrate

    shown = demonstrate(out, progress=functools.partial(counted, quiet=as_json), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(_record(shown) | {"report": str(out / "report.html")}))
        return
    _print(shown)
    typer.echo(f"report: {out / 'report.html'}")


def _record(shown: DemoResult) -> dict[str, Any]:
    curves = [dataclasses.replace(row, curve=tuple(one.tolist() for one in row.curve)) for row in shown.rows]
    found = dataclasses.asdict(dataclasses.replace(shown.clinic, folder=None))  # type: ignore[arg-type]
    return {"rows": [vars(row) for row in curves], "clinic": found, "forgery": vars(shown.forgery)}


def _print(shown: DemoResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from terrine.rounding import up

    table = Table(title="digits: 1,200 private examples, delta 1e-05; the attacks prove that epsilon is at least ...")
    table.add_column("model", no_wrap=True)
    for title in ("epsilon", "accuracy", "area", "attack", "canaries"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in shown.rows:
        table.add_row(
            row.name,
            "none" if row.epsilon is None else up(row.epsilon),
            f"{100 * row.accuracy:.1f}%",
            f"{row.area:.3f}",
            f"{row.model_audit:.2f}",
            "-" if row.canary_audit is None else f"{row.canary_audit:.2f}",
            row.verdict,
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print("\none ledger, one budget per patient: epsilon 3")
    for entry in shown.clinic.entries:
        console.print(f"  charged  {entry.purpose}, by {entry.by}: epsilon {up(entry.epsilon)}")
    console.print(f"  refused  another training: {shown.clinic.refused}", markup=False)
    console.print(f"\na forged claim, epsilon {shown.forgery.forged:.2g} instead of {up(shown.forgery.claimed, 2)}:")
    console.print(f"  terrine verify  {shown.forgery.detail}", markup=False)
