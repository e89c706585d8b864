"""The pictures of a page, as SVG text that stands in the page itself."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.errors import MissingExtra
from terrine.rounding import up

Floats = NDArray[np.float64]
INK, RED, BLUE, GREY = "#22313f", "#b0413e", "#2f6690", "#8d99a6"
_COLOURS = {"tight": RED, "renyi": BLUE, "moments": "#3a7d44", "advanced": "#b08900", "basic": GREY}


def epsilon_over_training(at: Sequence[float], curves: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """Epsilon of every accountant as the run goes on, on a log scale."""
    figure, axes = _canvas(7.2, 3.7)
    for name, values in curves.items():
        width = 2.8 if name == "tight" else 1.5
        label = f"{'certified (tight)' if name == 'tight' else name}: {values[-1]:.3g}"
        axes.plot(at, values, color=_COLOURS.get(name, INK), linewidth=width, label=label)
    axes.set(xlabel=unit, ylabel="epsilon", yscale="log", xlim=(0, at[-1]))
    axes.legend(title="at the end", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
    return _svg(figure)


def trade_off(
    false_positive_rate: Floats, most: Floats, attack: tuple[Floats, Floats] | None, *, epsilon: float, delta: float
) -> str:
    """The most that any attack can find, and what the audit's attack did find."""
    figure, axes = _canvas(5.0, 4.3)
    axes.fill_between(false_positive_rate, most, 1, color=RED, alpha=0.10, linewidth=0)
    axes.plot(
        false_positive_rate,
        most,
        color=RED,
        linewidth=2.2,
        label=f"certified limit (epsilon {up(epsilon, 3)} at {delta:g})",
    )
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="guessing")
    if attack is not None:
        axes.plot(*attack, color=BLUE, linewidth=1.8, drawstyle="steps-post", label="the audit's attack")
    axes.set(xlabel="false alarms", ylabel="found, of those who were in", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right", fontsize=8.5)
    return _svg(figure)


def attacks(curves: Mapping[str, tuple[Floats, Floats]]) -> str:
    """What the same attack finds in several models."""
    figure, axes = _canvas(5.0, 4.3)
    for (name, curve), colour in zip(curves.items(), (RED, BLUE, "#3a7d44"), strict=False):
        axes.plot(*curve, color=colour, linewidth=2.2, drawstyle="steps-post", label=name)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2, label="guessing")
    axes.set(xlabel="false alarms", ylabel="found, of those who were in", xlim=(-0.01, 1), ylim=(0, 1.01))
    axes.legend(frameon=False, loc="lower right", fontsize=8.5)
    return _svg(figure)


def bars(values: Mapping[str, float]) -> str:
    """Accuracies, side by side."""
    figure, axes = _canvas(6.2, 0.5 + 0.45 * len(values))
    names = list(values)[::-1]
    shares = [100 * values[name] for name in names]
    axes.barh(names, shares, color=[RED if name.startswith("this") else GREY for name in names], height=0.6)
    for place, share in enumerate(shares):
        inside = share > 85
        axes.text(
            share - 1 if inside else share + 1, place, f"{share:.1f}%", va="center", ha="right" if inside else "left",
            fontsize=9, color="white" if inside else INK,
        )  # fmt: skip
    axes.set(xlim=(0, 100), xlabel="accuracy, %")
    axes.grid(visible=False, axis="y")
    return _svg(figure)


def accuracy_against_epsilon(runs: Mapping[str, Sequence[tuple[float, float]]], flat: Mapping[str, float]) -> str:
    """Accuracy at each certified epsilon, by method, with lines for what knows no epsilon."""
    figure, axes = _canvas(6.4, 3.7)
    for (name, points), colour in zip(runs.items(), (RED, BLUE, "#3a7d44"), strict=False):
        epsilons, shares = zip(*sorted(points), strict=True)
        axes.plot(epsilons, [100 * share for share in shares], "o-", color=colour, linewidth=2, label=name)
    for (name, share), style in zip(flat.items(), ("--", ":"), strict=False):
        axes.axhline(100 * share, color=INK, linestyle=style, linewidth=1.2, label=f"{name}: {100 * share:.1f}%")
    axes.set(xlabel="epsilon (certified)", ylabel="accuracy, %", ylim=(0, 100))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
    return _svg(figure)


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", extra="report") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.22)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
