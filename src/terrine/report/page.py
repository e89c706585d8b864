"""One self-contained HTML page for a run, and one that compares several: no script, no network, no other file."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrine import check
from terrine.errors import MissingExtra
from terrine.rounding import up

_TEMPLATES = Path(__file__).parent / "templates"


def check_installed() -> None:
    """Refuse to begin what ends with a page that cannot be made.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtra("jinja2", extra="report")


def render(template: str, values: Mapping[str, Any]) -> str:
    """The page that a template makes of `values`; every text in them is escaped, for HTML or for Markdown, pictures
    are not.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MissingExtra("jinja2", extra="report") from None
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: bool(name) and not str(name).endswith(".md"),
        finalize=_in_markdown if template.endswith(".md") else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.1f}%"
    environment.filters["up"] = rounded_up
    return environment.get_template(template).render(**values)


def _in_markdown(value: Any) -> Any:
    """A text that Markdown shows as it is: no mark-up, no HTML, no second line."""
    if not isinstance(value, str):
        return value
    shown = check.printable(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_~\[\]|])", r"\\\1", shown)


def style_sheet() -> str:
    """How the pages look."""
    return (_TEMPLATES / "style.css").read_text(encoding="utf-8")


def rounded_up(value: float) -> str:
    """Four digits, never below the value: a printed epsilon is a bound too."""
    return up(value, 4)
