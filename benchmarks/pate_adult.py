"""PATE on Adult with scikit-learn teachers: the student against the non-private model, at epsilon 1 and 2.

    python benchmarks/pate_adult.py [--teachers 500] [--queries 1500] [--seeds 0 1 2] [--json FILE]

Teachers share the 32,561 training rows; the student's public pool is the first 8,000 test rows without labels, its
examination the other 8,281. The noise is chosen for `--queries` answers at each epsilon (delta 1e-5, certified,
data-independent). The student's regularisation is chosen by cross-validation on the noisy answers. The number of
teachers, theirs, and the number of queries were chosen on the true labels of the pool, which take no other part; some
earlier settings had been examined before, so the examination is not wholly fresh.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV

from terrine import accounting, datasets, pate
from terrine.events import Budget
from terrine.pate import teachers

POOL = 8000
"""The test rows that are the student's public pool; the others are its examination."""
_data = functools.cache(datasets.adult)


def voted(count: int, *, seed: int, jobs: int) -> pate.Votes:
    """The votes of so many teachers on the pool."""
    adult = _data()
    trained = teachers.train_estimators(
        LogisticRegression(C=100.0, max_iter=300),
        adult.train,
        adult.train_labels,
        pate.split(len(adult.train), count, seed=seed),
        classes=2,
        jobs=jobs,
    )
    return trained.votes(adult.test[:POOL], classes=2)


def taught(votes: pate.Votes, epsilon: float, *, queries: int, seed: int) -> dict[str, float]:
    """A student of so many GNMax answers, whose noise costs `epsilon` whatever the votes."""
    adult, budget = _data(), Budget(epsilon, 1e-5)
    pool, exam, truth = adult.test[:POOL], adult.test[POOL:], adult.test_labels[POOL:]
    noise = accounting.calibrate(lambda value: pate.GaussianMax(value).event(queries), budget)
    chosen = np.random.default_rng(seed).permutation(POOL)[:queries]
    rule, some = pate.GaussianMax(noise), votes.take(chosen)
    answers = rule.answer(some)
    priced = pate.bill(some, answers, rule, delta=1e-5)
    certain = accounting.epsilon(answers.event, delta=1e-5)  # of the labels; the sanitised number is the other choice
    assert math.isfinite(certain)
    pupil = LogisticRegressionCV(Cs=np.geomspace(1e-3, 10, 9), max_iter=1000).fit(pool[chosen], answers.labels)
    return {
        "seed": seed,
        "epsilon": certain,
        "epsilon_sanitised": priced.sanitised,
        "noise": noise,
        "epsilon_vote_dependent_opened": priced.sealed.unsafe_open(),
        "labels_right": float((answers.labels == adult.test_labels[chosen]).mean()),
        "ensemble": float((votes.counts.argmax(axis=1) == adult.test_labels[:POOL]).mean()),
        "student": float(pupil.score(exam, truth)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teachers", type=int, default=500)
    parser.add_argument("--queries", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    adult = _data()
    exam, truth = adult.test[POOL:], adult.test_labels[POOL:]
    whole = HistGradientBoostingClassifier(random_state=0).fit(adult.train, adult.train_labels)
    plain = LogisticRegression(max_iter=1000).fit(adult.train, adult.train_labels)
    result: dict[str, Any] = {
        "non-private boosting": float(whole.score(exam, truth)),
        "non-private logistic": float(plain.score(exam, truth)),
        "runs": [],
    }
    print({name: value for name, value in result.items() if name != "runs"}, flush=True)
    for seed in options.seeds:
        votes = voted(options.teachers, seed=seed, jobs=options.jobs)
        for epsilon in (1.0, 2.0):
            row = taught(votes, epsilon, queries=options.queries, seed=seed)
            result["runs"].append(row)
            print(row, flush=True)
    for epsilon in (1.0, 2.0):
        scores = [row["student"] for row in result["runs"] if abs(row["epsilon"] - epsilon) < 0.1]
        print(f"epsilon {epsilon}: student {np.mean(scores):.4f} +- {np.std(scores):.4f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
