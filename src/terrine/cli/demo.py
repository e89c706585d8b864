"""`terrine demo`: the whole job on digits, offline."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terrine.cli.progress import counted

if TYPE_CHECKING:
    from terrine.pipeline.demo import Row


def demo(
    out: Annotated[Path, typer.Option(help="Where runs and the page go.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Baseline, DP-SGD and PATE on digits, each audited: one table, and OUT/report.html."""
    from terrine.pipeline.demo import demonstrate

    rows = demonstrate(out, progress=functools.partial(counted, quiet=as_json), quiet=as_json)
    if as_json:
        typer.echo(json.dumps({"report": str(out / "report.html"), "rows": [vars(row) for row in rows]}))
        return
    _print(rows)
    typer.echo(f"report: {out / 'report.html'}")


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    from terrine.rounding import up

    table = Table(title="digits: 1,200 private examples, delta 1e-05; the attacks prove that epsilon is at least ...")
    table.add_column("model", no_wrap=True)
    for title in ("epsilon", "accuracy", "area", "attack", "canaries"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            "none" if row.epsilon is None else up(row.epsilon),
            f"{100 * row.accuracy:.1f}%",
            f"{row.area:.3f}",
            f"{row.model_audit:.2f}",
            "-" if row.canary_audit is None else f"{row.canary_audit:.2f}",
            row.verdict,
        )
    Console().print(table)
