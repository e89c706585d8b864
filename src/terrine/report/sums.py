"""Ways of summing, as bars on a logarithmic scale: time of a client, of the servers, and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrine.errors import MissingExtra


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture of a comparison.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", extra="report") from error
    rows = [one for one in found["rows"] if not one["skipped"]][::-1]
    names = [one["way"] for one in rows]
    figure = Figure(figsize=(10, 0.45 * len(rows) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    left.barh([place + 0.2 for place in places], [one["client_ms"] for one in rows], 0.4, label="one client")
    left.barh([place - 0.2 for place in places], [one["server_ms"] for one in rows], 0.4, label="servers")
    left.set_yticks(list(places), names)
    left.set_xlabel("milliseconds")
    left.legend(loc="lower right")
    right.barh(list(places), [one["bytes"] for one in rows], 0.6, color="tab:green")
    right.set_xlabel("bytes that a client sends")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"Sums of {found['parties']} vectors of {found['length']} numbers")
    figure.savefig(path)
