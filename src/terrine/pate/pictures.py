"""Pictures of a run, as SVG: the flow, the vote gaps (the owner's eyes only) and epsilon against queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from terrine import accounting, files
from terrine.errors import MissingExtra
from terrine.pate.named import made
from terrine.pate.run import RunFolder
from terrine.pate.votes import Votes


def epsilon_against_queries(run: RunFolder, delta: float, folder: Path) -> Path:
    """Draw the plan's certified epsilon after 1, 2, .. queries. Public."""
    record, answers = run._read("labels.json"), run.answers()
    rule = made(record["aggregator"], record["fields"], queries=len(answers.labels))
    counts = np.unique(np.geomspace(1, max(1, answers.asked), 40).astype(int))
    epsilons = [accounting.epsilon(rule.event(int(number)), delta=delta) for number in counts]
    plot, axes = _canvas("queries", f"epsilon at delta {delta:g}")
    axes.plot(counts, epsilons, color="#a23b2a", label="data-independent, certified")
    shown = run.bill(delta=delta, sanitise=False)
    if shown["epsilon_sanitised"] is not None:
        axes.axhline(shown["epsilon_sanitised"], color="#2a6fa2", linestyle="--", label="sanitised, whole run")
    axes.legend(frameon=False)
    return _saved(plot, folder, "epsilon.svg", private=False)


def vote_gaps(votes: Votes, folder: Path) -> Path:
    """Draw how often the first class leads the second by how many votes. Private: made from the votes."""
    falling = np.sort(votes.counts, axis=1)[:, ::-1]
    plot, axes = _canvas("votes between first and second class", "queries")
    axes.hist(falling[:, 0] - falling[:, 1], bins=min(50, votes.teachers), color="#a23b2a")
    axes.set_title("private: stays with the owner", fontsize=9)
    return _saved(plot, folder, "vote-gaps.svg", private=True)


def flow(folder: Path) -> Path:
    """Draw who sees what: private data, teachers and votes on one side, answers and student on the other."""
    plot, axes = _canvas("", "")
    axes.axis("off")
    boxes = ["private\ndata", "teachers\n(disjoint)", "votes", "noisy\nanswers", "student"]
    for place, text in enumerate(boxes):
        colour = "#f3d9d2" if place < 3 else "#d6e6f2"
        axes.text(place, 0.5, text, ha="center", va="center", bbox={"boxstyle": "round,pad=0.6", "fc": colour})
        if place:
            axes.annotate("", (place - 0.32, 0.5), (place - 0.68, 0.5), arrowprops={"arrowstyle": "->"})
    axes.text(3.5, 0.1, "public inputs", ha="center", bbox={"boxstyle": "round", "fc": "#d6e6f2"})
    axes.axvline(2.5, linestyle=":", color="grey")
    axes.text(1, 0.9, "stays with the owner", ha="center", fontsize=9)
    axes.text(3.5, 0.9, "charged, then shown", ha="center", fontsize=9)
    axes.set_xlim(-0.6, 4.6)
    axes.set_ylim(0, 1)
    return _saved(plot, folder, "flow.svg", private=False)


def _canvas(across: str, up: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", extra="report") from None
    plot = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = plot.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return plot, axes


def _saved(plot: Any, folder: Path, name: str, *, private: bool) -> Path:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with files.written(target / name, private=private) as file:
        plot.savefig(file, format="svg", metadata={"Date": None})
    return target / name
