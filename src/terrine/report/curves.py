"""Curves of epsilon, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from terrine.errors import MissingExtra
from terrine.rounding import up


def draw_accountants(at: Sequence[float], curves: Mapping[str, Sequence[float]], *, title: str, to: Path) -> None:
    """Epsilon of every accountant over epochs, on a log scale, into the picture `to`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", extra="report") from None
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for name, values in curves.items():
        proven = "not proven" not in name
        axes.plot(
            at,
            values,
            label=f"{name}: {up(values[-1], 3)}",
            linewidth=2.6 if name == "tight" else 1.6,
            linestyle="-" if proven else ":",
        )
    axes.set(xlabel="epochs", ylabel="epsilon", yscale="log", title=title)
    axes.grid(alpha=0.25, which="both")
    axes.legend(
        title=f"after {at[-1]:g} epochs", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8
    )
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=150)
