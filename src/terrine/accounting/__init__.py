"""Events in, certified epsilon out.

    epsilon(event, delta=1e-5)      the tightest proven upper bound
    bounds(event, delta=1e-5)       a proven enclosure; with witness=True checked by a slow and obvious accountant
    profile(event)                  the whole curve, and the best attack it allows
    calibrate(family, budget)       the parameter that spends a budget

One module holds each classical method, so that they can be compared: `composition`, `amplification`, `moments`,
`renyi`.
"""

from terrine.accounting.calibration import NOISE, RATE, STEPS, calibrate
from terrine.accounting.certified import Bounds
from terrine.accounting.profiles import Profile, claimed_profile, profile
from terrine.accounting.tightest import bounds, delta, epsilon

__all__ = [
    "NOISE",
    "RATE",
    "STEPS",
    "Bounds",
    "Profile",
    "bounds",
    "calibrate",
    "claimed_profile",
    "delta",
    "epsilon",
    "profile",
]
