"""The model card: what is handed on, in words, from the claim and the results alone."""

from __future__ import annotations

from typing import Any

from terrine import accounting
from terrine.accounting import Profile
from terrine.events.codec import from_dict
from terrine.report import review
from terrine.report.page import render
from terrine.rounding import up


def text(privacy: dict[str, Any], results: dict[str, Any]) -> str:
    """The card, as Markdown; it follows from its two arguments.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    return render("model_card.md", shared(privacy, results, curve(privacy)))


def curve(privacy: dict[str, Any]) -> Profile:
    """What the events allow, through the claimed point."""
    return accounting.claimed_profile(from_dict(privacy["events"]["event"]), delta=privacy["delta"])


def shared(privacy: dict[str, Any], results: dict[str, Any], allowed: Profile) -> dict[str, Any]:
    """What card and report both say."""
    words = allowed.in_words(unit=privacy["unit"], epsilon=privacy["epsilon"], delta=privacy["delta"])
    off = results.get("off_by_at_most")
    names = ("model", "classes", "parameters", "accuracy", "majority", "measured_on")
    return {
        "name": results["data"],
        "privacy": privacy,
        "words": words,
        "counted": _counted(privacy),
        "short": review.short(privacy, words),
        "rows": results.get("rows"),
        "off_by": None if off is None else f"{up(100 * off, 3)}%",
        "number": results.get("target"),
        "errors": _errors(results),
        **{name: results[name] for name in names},
    }


def _errors(results: dict[str, Any]) -> str | None:
    """How good predictions of a number are, in words."""
    if "mean_absolute_error" not in results:
        return None
    r2 = "not known" if results["r2"] is None else f"{results['r2']:.3f}"
    off = results.get("off_by_at_most")
    sure = "" if off is None else f" (off by at most {up(off, 3)} with probability 95%)"
    root = f"root mean squared error {results['root_mean_squared_error']:.4g}"
    return f"mean absolute error {results['mean_absolute_error']:.4g}{sure}, {root}, R2 {r2}"


def _counted(privacy: dict[str, Any]) -> str:
    """How many private rows or people there were, in words."""
    if "clients" in privacy:
        return f"the data of {privacy['clients']:,} clients"
    if "people" in privacy:
        return f"the rows of {privacy['people']:,} private people"
    return f"{privacy['examples']:,} private examples"
