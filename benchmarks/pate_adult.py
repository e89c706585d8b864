"""PATE on Adult with scikit-learn teachers: the student against the non-private model, at epsilon 1 and 2.

    python benchmarks/pate_adult.py [--teachers 500] [--queries 1500] [--seeds 0 1 2] [--json FILE]

Teachers share the 32,561 training rows; the student's public pool is the first 8,000 test rows without labels, its
examination the other 8,281. The noise is chosen for `--queries` answers at each epsilon (delta 1e-5, certified,
data-independent). The student's regularisation is chosen by cross-validation on the noisy answers. The number of
teachers, theirs, and the number of queries were chosen on the true labels of the pool, which take no other part; the
examination rows took none in any choice.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV

from terrine import accounting, datasets, pate
from terrine.events import Budget
from terrine.pate import teachers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teachers", type=int, default=500)
    parser.add_argument("--queries", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    adult = datasets.adult()
    pool, exam, truth = adult.test[:8000], adult.test[8000:], adult.test_labels[8000:]
    whole = HistGradientBoostingClassifier(random_state=0).fit(adult.train, adult.train_labels)
    plain = LogisticRegression(max_iter=1000).fit(adult.train, adult.train_labels)
    result: dict[str, object] = {
        "non-private boosting": float(whole.score(exam, truth)),
        "non-private logistic": float(plain.score(exam, truth)),
        "runs": [],
    }
    print({name: value for name, value in result.items() if name != "runs"}, flush=True)
    for seed in options.seeds:
        deal = pate.split(len(adult.train), options.teachers, seed=seed)
        trained = teachers.train_estimators(
            LogisticRegression(C=100.0, max_iter=300),
            adult.train,
            adult.train_labels,
            deal,
            classes=2,
            jobs=options.jobs,
        )
        votes = trained.votes(pool, classes=2)
        for epsilon in (1.0, 2.0):
            budget = Budget(epsilon, 1e-5)
            noise = accounting.calibrate(lambda value: pate.GaussianMax(value).event(options.queries), budget)
            chosen = np.random.default_rng(seed).permutation(len(pool))[: options.queries]
            rule = pate.GaussianMax(noise)
            answers = rule.answer(votes.take(chosen))
            priced = pate.bill(votes.take(chosen), answers, rule, delta=1e-5)
            pupil = LogisticRegressionCV(Cs=np.geomspace(1e-3, 10, 9), max_iter=1000).fit(pool[chosen], answers.labels)
            row = {
                "seed": seed,
                "epsilon": priced.data_independent,
                "epsilon_sanitised": priced.sanitised,
                "noise": noise,
                "epsilon_vote_dependent_opened": priced.sealed.unsafe_open(),
                "labels_right": float((answers.labels == adult.test_labels[chosen]).mean()),
                "ensemble": float((votes.counts.argmax(axis=1) == adult.test_labels[:8000]).mean()),
                "student": float(pupil.score(exam, truth)),
            }
            assert math.isfinite(priced.data_independent)
            result["runs"].append(row)  # type: ignore[attr-defined]
            print(row, flush=True)
    for epsilon in (1.0, 2.0):
        scores = [row["student"] for row in result["runs"] if abs(row["epsilon"] - epsilon) < 0.1]  # type: ignore[attr-defined]
        print(f"epsilon {epsilon}: student {np.mean(scores):.4f} +- {np.std(scores):.4f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
