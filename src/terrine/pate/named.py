"""Aggregators, models and methods by the names that files and commands give them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from terrine import check
from terrine.errors import InvalidArgument
from terrine.pate.aggregators import ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import Aggregator
from terrine.pate.stability import SparseVectorMax, StableMax, SubsampleAggregate

AGGREGATORS: dict[str, type[Aggregator]] = {
    "laplace": LaplaceMax,
    "gaussian": GaussianMax,
    "confident": ConfidentGaussianMax,
    "interactive": InteractiveGaussianMax,
    "stable": StableMax,
    "subsample": SubsampleAggregate,
    "sparse": SparseVectorMax,
}
MODELS = ("network", "logistic", "forest", "boosting")


def kind_of(aggregator: str) -> Any:
    """The class of the aggregator of that name.

    Raises:
        InvalidArgument: an unknown name.
    """
    if aggregator not in AGGREGATORS:
        raise check.refuse("aggregator", aggregator, f"one of {', '.join(AGGREGATORS)}")
    return AGGREGATORS[aggregator]


def made(aggregator: str, fields: Mapping[str, Any], *, queries: int) -> Aggregator:
    """The aggregator of that name.

    Raises:
        InvalidArgument: an unknown name, or fields it does not have or lacks.
    """
    kind = kind_of(aggregator)
    wanted = {one.name: one.default is dataclasses.MISSING for one in dataclasses.fields(kind)}
    given = {name: value for name, value in fields.items() if value is not None}
    if kind is SparseVectorMax:
        given.setdefault("queries", queries)
    if missing := [name for name, needed in wanted.items() if needed and name not in given]:
        raise InvalidArgument(f"{aggregator}: {', '.join(missing)} missing: want {', '.join(wanted)}")
    if strange := [name for name in given if name not in wanted]:
        raise InvalidArgument(f"{aggregator} has no {', '.join(strange)}: want {', '.join(wanted)}")
    made_one: Aggregator = kind(**given)
    return made_one


def estimator(model: str) -> Any:
    """A scikit-learn classifier by its short name."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    known: dict[str, Callable[[], Any]] = {
        "logistic": lambda: LogisticRegression(max_iter=500),
        "forest": lambda: RandomForestClassifier(100, random_state=0),
        "boosting": lambda: HistGradientBoostingClassifier(random_state=0),
    }
    if model not in known:
        raise check.refuse("model", model, f"one of {', '.join(MODELS)}")
    return known[model]()


def builder(shape: tuple[int, ...], classes: int, *, student: bool) -> Any:
    """A function that builds a network for inputs of this shape."""
    from terrine.pate import networks

    if len(shape) == 1:
        return functools.partial(networks.perceptron, shape[0], classes)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise InvalidArgument(f"inputs have shape {shape}: want a vector or square images (channels, size, size)")
    return functools.partial(networks.student if student else networks.teacher, shape[0], shape[1], classes)


def methods() -> dict[str, Any]:
    """The ways a network student learns, by name."""
    from terrine.pate import student

    return {
        "supervised": student.Supervised(),
        "consistency": student.Consistency(),
        "vat": student.VirtualAdversarial(),
        "gan": student.FeatureMatching(),
    }
