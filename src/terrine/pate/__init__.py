"""PATE: teachers on disjoint parts of private data vote; noisy answers teach a public student."""

from typing import TYPE_CHECKING, Any

from terrine.pate.aggregators import ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import ABSTAINED, Answers
from terrine.pate.billing import Bill, Sealed, bill
from terrine.pate.partitions import Membership, Partition, Subsampled, split
from terrine.pate.sanitised import PlannedRelease, planned_release
from terrine.pate.stability import SparseVectorMax, StableMax, SubsampleAggregate
from terrine.pate.votes import Votes, count

if TYPE_CHECKING:
    from terrine.pate.stacked import Recipe

__all__ = [
    "ABSTAINED",
    "Answers",
    "Bill",
    "ConfidentGaussianMax",
    "GaussianMax",
    "InteractiveGaussianMax",
    "LaplaceMax",
    "Membership",
    "Partition",
    "PlannedRelease",
    "Recipe",
    "Sealed",
    "SparseVectorMax",
    "StableMax",
    "SubsampleAggregate",
    "Subsampled",
    "Votes",
    "bill",
    "count",
    "planned_release",
    "split",
]


def __getattr__(name: str) -> Any:
    if name == "Recipe":  # the only part of this list that needs torch
        from terrine.pate.stacked import Recipe

        return Recipe
    raise AttributeError(f"module 'terrine.pate' has no attribute {name!r}")
