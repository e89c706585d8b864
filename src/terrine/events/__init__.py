"""What happened to the data, as frozen values: public records that can be priced without the data."""

from terrine.events.budget import Budget
from terrine.events.codec import from_json, to_json
from terrine.events.compose import (
    Composed,
    Event,
    OneOf,
    Repeated,
    Reproducible,
    is_reproducible,
    leaves,
    settled_neighbours,
    settled_unit,
)
from terrine.events.noise import (
    ApproximateDP,
    DiscreteGaussian,
    DiscreteLaplace,
    Gaussian,
    Laplace,
    NonPrivate,
    PureDP,
    RandomizedResponse,
    Selection,
    Skellam,
    SummedDiscreteGaussian,
)
from terrine.events.relation import Neighbours, Unit
from terrine.events.sampling import FixedSizeSampled, PoissonSampled, ShuffledEpoch
from terrine.events.stopping import NegativeBinomialCount, PoissonCount, RandomStopping

__all__ = [
    "ApproximateDP",
    "Budget",
    "Composed",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Event",
    "FixedSizeSampled",
    "Gaussian",
    "Laplace",
    "NegativeBinomialCount",
    "Neighbours",
    "NonPrivate",
    "OneOf",
    "PoissonCount",
    "PoissonSampled",
    "PureDP",
    "RandomStopping",
    "RandomizedResponse",
    "Repeated",
    "Reproducible",
    "Selection",
    "ShuffledEpoch",
    "Skellam",
    "SummedDiscreteGaussian",
    "Unit",
    "from_json",
    "is_reproducible",
    "leaves",
    "settled_neighbours",
    "settled_unit",
    "to_json",
]
