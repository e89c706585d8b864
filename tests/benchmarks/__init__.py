"""Benchmarks are scripts, not a package: tests run the same code, at a smaller size."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def load(name: str) -> ModuleType:
    """A benchmark as a module; processes that it starts find it by the same name."""
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    return importlib.import_module(name)
