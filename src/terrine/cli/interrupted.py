"""An interrupted run says in one line what is kept, what was charged, and how to go on; exit code 130."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import typer


class Interrupted(typer.Abort):
    """Ctrl-C, with what to say about it."""


@contextlib.contextmanager
def explained(folder: Path, command: str) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted`, which says what the run in `folder` has kept and paid."""
    try:
        yield
    except (KeyboardInterrupt, typer.Abort) as stop:
        raise Interrupted(_standing(folder, command)) from stop


def _standing(folder: Path, command: str) -> str:
    owner = folder / "owner"
    try:
        receipt = json.loads((owner / "receipt.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "interrupted: nothing was charged and no step taken; the same command begins anew"
    charged = "nothing was charged (no --ledger)"
    if receipt.get("account"):
        charged = f"the whole run was charged to {receipt['account']!r}, once: going on charges nothing more"
    return f"interrupted: {_kept(folder)}; {charged}; the same {command} command goes on from there"


def _kept(folder: Path) -> str:
    owner = folder / "owner"
    if (folder / "manifest.json").exists():
        return f"{folder} holds the finished run"
    if (owner / "checkpoint.pt").exists():
        return f"{folder} keeps the model as it was last saved, and counts the steps since as spent"
    if (owner / "statistics.npz").exists():
        return f"{folder} keeps the release"
    return f"{folder} keeps the receipt, no step was saved yet"
