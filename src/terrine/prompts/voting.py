"""Buying labels for a budget: the noise of Confident-GNMax from public numbers alone [PSM18].

    queries x Gaussian(test noise), queries x Gaussian(noise / sqrt 2)  within the budget,   test noise = noise

The cost is that of every query being tested and answered, whatever the votes: it can be printed.
"""

from __future__ import annotations

from typing import Any

from terrine import accounting, check
from terrine.events import Budget, Neighbours, is_reproducible
from terrine.events.codec import to_dict
from terrine.pate import Answers, ConfidentGaussianMax


def confident(budget: Budget, *, teachers: int, queries: int, agreement: float = 0.6) -> ConfidentGaussianMax:
    """The aggregator with the least noise that may answer all `queries` within `budget`.

    `agreement` is the share of the teachers that the plurality must reach, through noise, to be told.

    Raises:
        BudgetExceeded: no noise keeps the budget.
    """
    teachers, queries = check.whole("teachers", teachers, at_least=2), check.whole("queries", queries)
    threshold = check.half_open_unit("agreement", agreement) * teachers

    def rule(noise: float) -> ConfidentGaussianMax:
        return ConfidentGaussianMax(threshold=threshold, test_noise=noise, noise=noise)

    return rule(accounting.calibrate(lambda noise: rule(noise).event(queries), budget))


def record(answers: Answers, delta: float, *, texts: int | None = None) -> dict[str, Any]:
    """What a prompt made from `answers` about `texts` texts says about its privacy, whatever the votes were."""
    epsilon = accounting.epsilon(answers.event, delta=delta)
    return {
        "method": "PromptPATE",
        "private": True,
        "epsilon": epsilon,
        "delta": delta,
        "weak_guarantee": check.weakness(epsilon, delta, units=texts) or None,
        "neighbours": (answers.event.neighbours or Neighbours.REPLACE_ONE).value,
        "unit": answers.event.unit.value if answers.event.unit else "example",
        "reproducible_noise_for_tests_only": is_reproducible(answers.event),
        "event": to_dict(answers.event),
    }
