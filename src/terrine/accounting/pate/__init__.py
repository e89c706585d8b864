"""What PATE's answers cost: bounds that use the votes (sealed), their sensitivity, and the safe release of the bill.

`votes` is always an integer array (queries, classes); the order of the classes never matters.
"""

from terrine.accounting.pate.gaussian_max import gaussian_max_rdp, threshold_rdp
from terrine.accounting.pate.laplace_max import laplace_max_rdp, laplace_max_sensitivity
from terrine.accounting.pate.release import release_curve, smooth
from terrine.accounting.pate.sensitivity import (
    gaussian_max_local_sensitivity,
    gaussian_max_smooth_sensitivity,
    profile_of,
    sanitisable_rdp,
    threshold_local_sensitivity,
    threshold_smooth_sensitivity,
)

__all__ = [
    "gaussian_max_local_sensitivity",
    "gaussian_max_rdp",
    "gaussian_max_smooth_sensitivity",
    "laplace_max_rdp",
    "laplace_max_sensitivity",
    "profile_of",
    "release_curve",
    "sanitisable_rdp",
    "smooth",
    "threshold_local_sensitivity",
    "threshold_rdp",
    "threshold_smooth_sensitivity",
]
