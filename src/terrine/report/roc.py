"""The ROC curve of an attack on log-log axes, with what a claim forbids shaded.

(epsilon, delta)-DP allows at false-positive rate a at most min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a))
true positives. A curve that runs into the shade refutes the claim, as far as its ends are not chance.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terrine import files
from terrine.errors import MissingExtra

Floats = NDArray[np.float64]


def allowed(false_positive_rate: Floats, epsilon: float, delta: float) -> Floats:
    """The largest true-positive rate that (epsilon, delta)-DP allows."""
    grow = math.exp(min(epsilon, 700.0))
    bound: Floats = np.minimum(grow * false_positive_rate + delta, 1 - (1 - delta - false_positive_rate) / grow)
    return np.clip(bound, 0.0, 1.0)


def draw_roc(
    false_positive_rate: Floats,
    true_positive_rate: Floats,
    *,
    claim: tuple[float, float] | None,
    smallest: float,
    title: str,
    to: Path,
) -> None:
    """The curve, the diagonal of guessing, and the region that `claim` (epsilon, delta) forbids, into the picture `to`.

    `smallest` is where the axes begin: one over the number of non-members is what the scores can resolve.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", extra="report") from None
    figure = Figure(figsize=(5.6, 5.4), layout="constrained")
    axes = figure.add_subplot()
    rates = np.geomspace(smallest, 1.0, 400)
    axes.plot(rates, rates, color="0.55", linestyle=":", linewidth=1.2, label="guessing")
    if claim is not None:
        most = allowed(rates, *claim)
        axes.fill_between(
            rates,
            most,
            1.0,
            color="tab:red",
            alpha=0.16,
            linewidth=0,
            label=f"forbidden by epsilon {claim[0]:g}, delta {claim[1]:g}",
        )
        axes.plot(rates, most, color="tab:red", linewidth=1.0)
    axes.plot(
        np.maximum(false_positive_rate, smallest),
        np.maximum(true_positive_rate, smallest),
        color="tab:blue",
        linewidth=2.0,
        drawstyle="steps-post",
        label="the attack",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(smallest, 1.0),
        ylim=(smallest, 1.0),
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        title=title,
    )
    axes.grid(alpha=0.25, which="major")
    axes.legend(loc="lower right", fontsize=8)
    to.parent.mkdir(parents=True, exist_ok=True)
    with files.written(to, private=True) as file:  # it was made from scores of private rows
        figure.savefig(file, format=to.suffix[1:] or None, dpi=150)
