"""PATE: teachers on disjoint parts of private data vote; noisy answers teach a public student."""

from terrine.pate.aggregators import ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import ABSTAINED, Answers
from terrine.pate.billing import Bill, Sealed, bill
from terrine.pate.partitions import Membership, Partition, Subsampled, split
from terrine.pate.sanitised import PlannedRelease, planned_release
from terrine.pate.stability import SparseVectorMax, StableMax, SubsampleAggregate
from terrine.pate.votes import Votes, count

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
