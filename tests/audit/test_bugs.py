"""Mutants: each known bug in Terrine's own learners is VIOLATED; the correct learners never are."""

from __future__ import annotations

import pytest

from tests.benchmarks import load

BUGS = load("audit_bugs")


@pytest.mark.parametrize("name", list(BUGS.BUGS))
def test_bug_is_caught(name: str) -> None:
    bug, audit = BUGS.BUGS[name]
    with bug():
        found = audit(1)
    assert found.violated, found
    assert found.confidence == BUGS.CONFIDENCE


@pytest.mark.parametrize("name", list(BUGS.AUDITS))
def test_correct_learner_is_not(name: str) -> None:
    """Confidence 99.9%: two seeds of a correct learner raise a false alarm with a chance of at most 0.2%."""
    for seed in range(2):
        found = BUGS.AUDITS[name](seed)
        assert not found.violated, found
