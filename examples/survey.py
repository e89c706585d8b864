"""A survey on an embarrassing question: everyone flips coins before answering, and the share is still learned.

python examples/survey.py
"""

import math

import numpy as np

from terrine.mechanisms import RandomizedResponse


def main() -> None:
    fair = RandomizedResponse(truth=0.5)
    print(f"two fair coins cost epsilon = {fair.epsilon:.4f} = ln 3 = {math.log(3):.4f}")
    braver = RandomizedResponse(truth=0.75)
    print(f"truth with 75% costs epsilon = {braver.epsilon:.4f} = ln 7 = {math.log(7):.4f}")

    # 10,000 reports, 3,000 of them yes: half of all are coin flips, 2,500 of each answer, so 500 of 5,000 say yes.
    reports = np.array([1] * 3_000 + [0] * 7_000)
    estimate = fair.estimate(reports, confidence=0.95)
    print(f"3,000 of 10,000 reports are yes: the true share is about {estimate.shares[1]:.1%}", end=" ")
    print(f"({estimate.low[1]:.1%} to {estimate.high[1]:.1%} at 95%)")

    # The same from the start: 10% would say yes, and each of them reports through the coins.
    truth = np.array([1] * 1_000 + [0] * 9_000)
    release = fair.release(truth)
    again = fair.estimate(release.value)
    print(f"simulated: {release.value.mean():.1%} reported yes, estimate {again.shares[1]:.1%}", end=" ")
    print(f"({again.low[1]:.1%} to {again.high[1]:.1%})")
    print(f"cost to each person: {release.event}")


if __name__ == "__main__":
    main()
