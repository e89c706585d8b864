"""Tables: the UCI Adult census extract, numbers scaled by public ranges, categories one-hot by the published lists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine.datasets.files import read

_MD5 = {"adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "adult.test": "35238206dfdf7f1fe215bbb874adecdc"}
_NUMBERS = {0: (17, 90), 2: (0, 1_500_000), 4: (1, 16), 10: (0, 100_000), 11: (0, 5_000), 12: (1, 99)}
"""Columns with numbers, and the public range each is scaled by (age, weight, schooling, gain, loss, hours)."""
_LISTS = {
    1: "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    3: "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th 10th"
    " Doctorate 5th-6th Preschool",
    5: "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse",
    6: "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners"
    " Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
    7: "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    8: "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    9: "Female Male",
}
"""Categories as the publisher lists them; '?' is all zeros. Countries are left to one flag, United-States."""


@dataclass(frozen=True, eq=False)
class Table:
    """Features (rows, columns) as floats and labels, for training and for testing."""

    train: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    columns: tuple[str, ...]


def adult() -> Table:
    """Adult: does a person earn above 50,000? 32,561 and 16,281 rows, from `adult/` in the data folder."""
    train, train_labels = _rows("adult.data")
    test, test_labels = _rows("adult.test")
    return Table(train, train_labels, test, test_labels, _columns())


def _rows(name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    text = read(f"adult/{name}", _MD5[name]).decode("ascii")
    rows = [line.rstrip(".").split(", ") for line in text.splitlines() if line.count(",") == 14]
    features = np.array([_features(row) for row in rows], dtype=np.float32)
    return features, np.array([row[14] == ">50K" for row in rows], dtype=np.int64)


def _features(row: list[str]) -> list[float]:
    found = [(float(row[column]) - low) / (high - low) for column, (low, high) in _NUMBERS.items()]
    found += [float(row[10] != "0"), float(row[11] != "0")]
    for column, values in _LISTS.items():
        found += [float(row[column] == value) for value in values.split()]
    return [*found, float(row[13] == "United-States")]


def _columns() -> tuple[str, ...]:
    names = ["age", "weight", "schooling", "gain", "loss", "hours", "any-gain", "any-loss"]
    names += [value for values in _LISTS.values() for value in values.split()]
    return (*names, "United-States")
