"""`terrine sums`: what noise, masks, shares and encryption cost, side by side, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def sums(
    parties: Annotated[int, typer.Option(help="How many people's vectors.")] = 100,
    length: Annotated[int, typer.Option(help="Numbers in each.")] = 1000,
    plot: Annotated[Path | None, typer.Option(help="Draw times and bytes into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ways of summing private vectors: time, bytes, dropouts, trust, what is protected, and the error."""
    from terrine.federated import comparison

    found = comparison.record(parties, length, comparison.compare(parties, length))
    if plot is not None:
        _draw(found, plot)
    if as_json:
        typer.echo(json.dumps(found))
        return
    _print(found)
    if plot is not None:
        typer.echo(f"drawn: {plot}")


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    costs = Table(title=f"{found['parties']} vectors of {found['length']} numbers", box=None)
    meaning = Table(box=None)
    costs.add_column("way")
    for name in ("client ms", "server ms", "times noise", "bytes", "error"):
        costs.add_column(name, justify="right")
    for name in ("way", "protects", "trusted", "dropouts survived"):
        meaning.add_column(name)
    for one in found["rows"]:
        if one["skipped"]:
            meaning.add_row(one["way"], f"skipped: {one['skipped']}")
            continue
        costs.add_row(
            one["way"], f"{one['client_ms']:.2f}", f"{one['server_ms']:.2f}", f"{one['times_noise']:,.0f}",
            f"{one['bytes']:,}", f"{one['error']:.3g}",
        )  # fmt: skip
        meaning.add_row(one["way"], one["protects"], one["trusted"], one["dropouts"])
    console = Console(soft_wrap=True)
    console.print(costs)
    console.print()
    console.print(meaning)
    low, high = found["lecture"]["homomorphic encryption"]
    console.print(
        f"The lecture's factors: secret sharing about {found['lecture']['secret sharing']:g} times noise, homomorphic "
        f"encryption {low:g} to {high:,.0f} times. Ways with noise keep epsilon {found['epsilon']:g} at delta "
        f"{found['delta']:g} for one person.",
        highlight=False,
    )


def _draw(found: dict[str, Any], path: Path) -> None:
    from terrine.report.sums import draw

    draw(found, path)
