"""What an account can pay, asked before any work: the whole price of a run, and the epsilon that would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrine.errors import BudgetExceeded, TerrineError
from terrine.pipeline import planning
from terrine.pipeline.folder import ASKED, Folder
from terrine.pipeline.material import Opened
from terrine.pipeline.planning import RunPlan
from terrine.pipeline.settings import Settings
from terrine.rounding import down, up

_TRIALS = 5
_WORTH = 0.05
"""The smallest epsilon that is proposed, as a share of what was asked for."""


def bounded(settings: Settings, account: Any, folder: Folder) -> Settings:
    """The settings with a delta that the account allows, where none is given; a smaller bound of their own stays.

    A run that goes on without its account keeps what it began with.
    """
    if settings.delta is not None:
        return settings
    if folder.has(ASKED) and account is None:
        return replace(settings, delta_at_most=folder.read(ASKED).get("delta_at_most"))
    delta = getattr(getattr(account, "budget", None), "delta", None)
    known = [float(one) for one in (delta, settings.delta_at_most) if one]
    return replace(settings, delta_at_most=min(known)) if known else settings


def check(plan: RunPlan, opened: Opened, account: Any) -> None:
    """Refuse a run that the account cannot pay, and say which epsilon it could.

    Raises:
        BudgetExceeded: it has not enough left; nothing was charged.
    """
    if account is None or not callable(getattr(account, "would_cost", None)):
        return
    quote = account.would_cost(plan.event)
    if quote.fits:
        return
    left, limit = 100 * max(0.0, 1 - account.used()), account.budget
    wants = f"wants {up(100 * quote.share, 3)}%" if quote.share > 0 else "wants more"
    found = _fitting(plan, opened, account)
    hint = "want another account" if found is None else f"--epsilon {found:g} would fit"
    raise BudgetExceeded(
        f"epsilon {plan.settings.epsilon:g} at delta {plan.budget.delta:g} {wants} of account {account.name!r} "
        f"(epsilon {limit.epsilon:g}, delta {limit.delta:g}), which has {left:.3g}% left; nothing was charged; {hint}"
    )


def _fitting(plan: RunPlan, opened: Opened, account: Any) -> float | None:
    """An epsilon whose run the account can pay, near the largest; None where next to nothing is left."""
    low, high = 0.0, plan.settings.epsilon
    if (whole := account.budget.epsilon) < high and _fits(plan, opened, account, whole):
        return float(whole)
    for _ in range(_TRIALS):
        middle = (low + high) / 2
        low, high = (middle, high) if _fits(plan, opened, account, middle) else (low, middle)
    found = float(down(low, 3)) if low >= _WORTH * plan.settings.epsilon else 0.0
    return found if found > 0 and _fits(plan, opened, account, found) else None


def _fits(plan: RunPlan, opened: Opened, account: Any, epsilon: float) -> bool:
    try:
        event = planning.plan(replace(plan.settings, epsilon=epsilon), opened).event
    except TerrineError:
        return False
    return bool(account.would_cost(event).fits)
