"""What `terrine ledger show` prints of an account: what decides, what was spent, and by whom, when and what for."""

from __future__ import annotations

import collections
import json
import math
from typing import TYPE_CHECKING, Any

from terrine.events import to_json

if TYPE_CHECKING:
    from rich.table import Table

    from terrine.ledger import Account

_WIDTH = 40
_UNSAID = "not said"


def summary(account: Account, *, delta: float | None = None, last: int = 0) -> dict[str, Any]:
    """The account as plain JSON values, with its newest charges."""
    report = account.report(delta)
    newest = collections.deque(account.history(), maxlen=last) if last else ()
    return {
        "account": account.name,
        "budget": {"epsilon": account.budget.epsilon, "delta": account.budget.delta},
        "unit": account.unit.value,
        "neighbours": account.neighbours.value,
        "partitions": list(account.partitions),
        "charges": report.charges,
        "decides": report.decides,
        "filter": {"used": finite(report.used), "left": report.left, "largest_epsilon": report.largest},
        "certified": {"epsilon": None if report.planned is None else finite(report.planned), "delta": report.delta},
        "claimed": {"epsilon": finite(report.adaptive), "delta": report.delta},
        "words": report.words(),
        "reproducible": report.reproducible,
        "head": account.head(),
        "history": [
            {
                "sequence": one.sequence,
                "at": one.at.isoformat(),
                "by": one.by,
                "purpose": one.purpose,
                "event": json.loads(to_json(one.event)),
                "partition": one.partition,
                "sealed": one.sealed,
                "hash": one.hash,
            }
            for one in newest
        ],
    }


def show(account: Account, delta: float | None, last: int) -> None:
    """Print the account."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from terrine.ledger.report import percent

    told, console = summary(account, delta=delta, last=last), Console(highlight=False)
    used = account.used()
    full = round(_WIDTH * min(1.0, used))
    console.print(f"[bold]{escape(account.name)}[/bold]: {budget(account)}")
    console.print("█" * full + "░" * (_WIDTH - full) + f"  {percent(used)} used")
    words = Table.grid(padding=(0, 2))
    for name, sentence in (told["words"] | {"write down": told["head"]}).items():
        words.add_row(name, escape(sentence))
    console.print(words)
    if told["reproducible"]:
        console.print("[red]Some noise came from a seed: whoever knows it sees through.[/red]")
    if told["history"]:
        console.print(_table(told["history"]))
    if (hidden := told["charges"] - len(told["history"])) > 0:
        console.print(f"and {hidden} earlier charges; --last {told['charges']} lists them all")


def budget(account: Account) -> str:
    """The budget in words."""
    amount = f"a budget of epsilon {account.budget.epsilon:g} at delta {account.budget.delta:g}"
    return f"{amount} for one {account.unit.value}, {account.neighbours.value} neighbours"


def finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else None


def _table(history: list[dict[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    columns = {
        "charge": [str(one["sequence"]) for one in history],
        "when (UTC)": [one["at"][:19].replace("T", " ") for one in history],
        "who": [one["by"] or _UNSAID for one in history],
        "what for": [one["purpose"] or _UNSAID for one in history],
        "event": [_event_text(one["event"]["event"]) for one in history],
        "partition": [one["partition"] for one in history],
        "sealed": ["yes" if one["sealed"] else "" for one in history],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table()
    for name in kept:
        table.add_column(name, overflow="fold", no_wrap=name in ("charge", "when (UTC)"))
    for cells in zip(*kept.values(), strict=True):
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _event_text(record: dict[str, Any]) -> str:
    inner = [_event_text(record["event"])] if "event" in record else []
    inner += [_event_text(part) for part in record.get("parts", [])[:3]]
    fields = [f"{name}={value}" for name, value in record.items() if name not in ("kind", "event", "parts")]
    return f"{record['kind']}({', '.join(inner + fields)})"
