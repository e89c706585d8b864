"""The average of ratings between 0 and 5: one person can move the sum by 5, so noise of scale 5/epsilon hides it.

python examples/average_rating.py
"""

import numpy as np

from terrine.events import Neighbours
from terrine.mechanisms import BoundedMean, BoundedSum


def main() -> None:
    ratings = np.random.default_rng(0).choice([0, 1, 2, 3, 4, 5], size=2_000, p=[0.05, 0.05, 0.1, 0.2, 0.3, 0.3])
    print(f"true average {ratings.mean():.3f} (never shown to anyone in real life)")

    total = BoundedSum(lower=0, upper=5, epsilon=1)
    print(f"noisy sum {total.release(ratings).value:.1f}; off by at most {total.error(confidence=0.95):.1f} at 95%")

    secret_number = BoundedMean(lower=0, upper=5, epsilon=1)
    print(f"noisy mean, number of people secret: {secret_number.release(ratings).value:.3f}")
    public_number = BoundedMean(lower=0, upper=5, epsilon=1, neighbours=Neighbours.REPLACE_ONE)
    release = public_number.release(ratings)
    print(f"noisy mean, number of people public: {release.value:.3f}")
    print(release.notes[0])

    # One rating of a million is clamped to 5: it can move the answer no more than any other.
    wild = np.append(ratings, 1_000_000)
    print(f"with one absurd rating: {secret_number.release(wild).value:.3f}")


if __name__ == "__main__":
    main()
