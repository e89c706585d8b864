"""Mutants: each known bug in Terrine's own learners is VIOLATED; the correct learners never are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "audit_bugs.py"
    spec = importlib.util.spec_from_file_location("audit_bugs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_bugs"] = module
    spec.loader.exec_module(module)
    return module


BUGS = _load()


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
