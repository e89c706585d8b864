"""Terrine: learn from private data, and say with a certificate how much the result can tell.

    from terrine import accounting, events

    step = events.PoissonSampled(events.Gaussian(noise=4.0), rate=0.01)
    accounting.epsilon(events.Repeated(step, times=10_000), delta=1e-5)    # 0.9469...

Sub-packages are imported when first used, so that `import terrine` costs next to nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.2.0"

_PACKAGES = frozenset(
    {
        "accounting",
        "audit",
        "client",
        "datasets",
        "errors",
        "events",
        "federated",
        "gateway",
        "integrations",
        "ledger",
        "linear",
        "mechanisms",
        "pate",
        "pipeline",
        "prompts",
        "queries",
        "sgd",
        "tables",
        "verify",
    }
)

__all__ = [
    "__version__",
    "accounting",
    "audit",
    "client",
    "datasets",
    "errors",
    "events",
    "federated",
    "gateway",
    "integrations",
    "ledger",
    "linear",
    "mechanisms",
    "pate",
    "pipeline",
    "prompts",
    "queries",
    "sgd",
    "tables",
    "verify",
]


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"terrine.{name}")
    raise AttributeError(f"module 'terrine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
