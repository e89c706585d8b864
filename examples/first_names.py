"""How often does each of 10,000 first names occur? One private histogram answers for all of them at once.

python examples/first_names.py
"""

import numpy as np

from terrine.mechanisms import Histogram, MostCommonValue

NAMES = 10_000
PEOPLE = 1_000_000


def main() -> None:
    # Synthetic people: the k-th most common name has a share proportional to 1/k.
    shares = 1 / np.arange(1, NAMES + 1)
    people = np.random.default_rng(0).choice(NAMES, size=PEOPLE, p=shares / shares.sum())
    counts = np.bincount(people, minlength=NAMES)

    histogram = Histogram(epsilon=1, bins=NAMES)
    promised = histogram.error(confidence=0.95)
    release = histogram.release(counts)
    worst = np.abs(release.value - counts).max()
    print(f"epsilon 1, {NAMES:,} names: with 95% confidence no count is off by more than {promised:.1f}")
    print(f"this time the worst is off by {worst}; the most common name has about {release.value[0]:,} people")
    print("five most common, with noise:", ", ".join(f"name {n}" for n in np.argsort(-release.value)[:5]))

    top = MostCommonValue(categories=tuple(range(NAMES)), epsilon=0.1)
    print(f"only the most common one, at epsilon 0.1: name {top.release(people).value}")


if __name__ == "__main__":
    main()
