"""The median income, two ways: the exponential mechanism, and noise fitted to how crowded the middle is.

python examples/private_median.py
"""

import numpy as np

from terrine.mechanisms import Quantile, SmoothMedian


def main() -> None:
    incomes = np.exp(np.random.default_rng(0).normal(10.5, 0.6, size=5_001))
    print(f"true median {np.median(incomes):,.0f} (never shown)")
    for epsilon in (0.1, 1.0):
        chosen = Quantile(q=0.5, lower=0, upper=500_000, epsilon=epsilon).release(incomes)
        smooth = SmoothMedian(lower=0, upper=500_000, epsilon=epsilon, delta=1e-6).release(incomes)
        pure = SmoothMedian(lower=0, upper=500_000, epsilon=epsilon).release(incomes)
        print(
            f"epsilon {epsilon}: exponential mechanism {chosen.value:,.0f}; smooth sensitivity {smooth.value:,.0f} "
            f"with Laplace noise (delta 1e-6), {pure.value:,.0f} with heavy tails (delta 0)"
        )
    print("bounds were declared, not read off the data:", chosen.notes[0])


if __name__ == "__main__":
    main()
