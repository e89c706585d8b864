"""Federated learning with a certified bill: clients' updates, summed so that nobody sees one, with the noise inside.

    plan = federated.Plan(clients=1_000, per_round=50, rounds=200, clip=0.5, budget=Budget(epsilon=4, delta=1e-5),
                          sums=federated.Skellam(bits=20, survivors=40))
    noisy = federated.secure.sum(vectors, plan, drop=[3, 7])

`Federation` runs all rounds in one process; `federated.flower` makes an app of Flower's private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrine.federated import secure
from terrine.federated.plan import AdaptiveClipping, Plan
from terrine.federated.sampling import MinimumSeparation, PoissonClients
from terrine.federated.sums import Central, DiscreteGaussian, Skellam

if TYPE_CHECKING:
    from terrine.federated.learning import FedAdam, FedAvg, Federation, Local

__all__ = [
    "AdaptiveClipping",
    "Central",
    "DiscreteGaussian",
    "FedAdam",
    "FedAvg",
    "Federation",
    "Local",
    "MinimumSeparation",
    "Plan",
    "PoissonClients",
    "Skellam",
    "secure",
]


def __getattr__(name: str) -> Any:
    if name in ("FedAdam", "FedAvg", "Federation", "Local"):  # what needs torch
        from terrine.federated import learning

        return getattr(learning, name)
    raise AttributeError(f"module 'terrine.federated' has no attribute {name!r}")
