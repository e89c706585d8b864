"""Number in, private `Release` out: a frozen value per mechanism, whose event says what it costs."""

from terrine.mechanisms.bounded import BoundedMean, BoundedSum, Origin
from terrine.mechanisms.counts import Counts, Histogram
from terrine.mechanisms.exponential import Exponential, PermuteAndFlip
from terrine.mechanisms.gaussian import Calibration, Gaussian
from terrine.mechanisms.laplace import Laplace
from terrine.mechanisms.noisy_max import Noise, NoisyMax
from terrine.mechanisms.quantile import MostCommonValue, Quantile
from terrine.mechanisms.randomized_response import Encoding, RandomizedResponse, UnaryEncoding
from terrine.mechanisms.release import Mechanism, Release
from terrine.mechanisms.smooth import SmoothMedian, SmoothNoise
from terrine.mechanisms.sparse_vector import AboveThreshold, SparseVector
from terrine.mechanisms.stability import StableRelease, gap_distance
from terrine.rng import Seeded

__all__ = [
    "AboveThreshold",
    "BoundedMean",
    "BoundedSum",
    "Calibration",
    "Counts",
    "Encoding",
    "Exponential",
    "Gaussian",
    "Histogram",
    "Laplace",
    "Mechanism",
    "MostCommonValue",
    "Noise",
    "NoisyMax",
    "Origin",
    "PermuteAndFlip",
    "Quantile",
    "RandomizedResponse",
    "Release",
    "Seeded",
    "SmoothMedian",
    "SmoothNoise",
    "SparseVector",
    "StableRelease",
    "UnaryEncoding",
    "gap_distance",
]
