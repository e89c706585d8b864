"""What a run learns from: private rows with labels, and whatever needs no protection.

Of a named data set the training part plays the private data. Its published test part needs no protection: accuracy
is measured on it, and PATE's student learns from the inputs of its first half (and is then measured on the second).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import datasets, tables
from terrine.errors import InvalidArgument
from terrine.events import Event
from terrine.runs import bounds
from terrine.runs.settings import Settings

Integers = NDArray[np.int64]
_DIGITS_FOR_TESTING = 597


@dataclass(frozen=True, eq=False)
class Material:
    """Private rows, and public ones where there are any."""

    name: str
    inputs: NDArray[Any]
    labels: Integers
    classes: tuple[str, ...]
    test: tuple[NDArray[Any], Integers] | None = None
    public: NDArray[Any] | None = None
    schema: tables.Schema | None = None
    found: bounds.Found | None = None
    """Bounds that were found privately."""
    preparation: tuple[Event, ...] = ()
    """What was paid for them."""
    published: bool = False
    """Whether the private rows are in truth a published data set, so that a baseline may be shown."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])


def gather(settings: Settings, found: bounds.Found | None = None) -> Material:
    """The material that the settings name; `found` are the private bounds of a run that was begun before.

    Raises:
        InvalidArgument: a file is missing or is not what it should be, or the schema is not confirmed.
    """
    return _of_table(settings, found) if settings.table is not None else _of_set(settings)


def schema_path(table: str | Path) -> Path:
    """Where a table's schema lies unless one is named: beside it."""
    path = Path(table)
    return path.with_name(f"{path.stem}.schema.toml")


def _of_set(settings: Settings) -> Material:
    assert settings.data is not None
    load: dict[str, Any] = {
        "digits": lambda: datasets.digits(test=_DIGITS_FOR_TESTING),
        "mnist": datasets.mnist,
        "fashion-mnist": datasets.fashion_mnist,
        "cifar-10": datasets.cifar10,
        "adult": datasets.adult,
    }
    found = load[settings.data]()
    classes = ("<=50K", ">50K") if settings.data == "adult" else tuple(str(one) for one in range(10))
    half = len(found.test) // 2
    pate = settings.method == "pate"
    tested = (found.test[half:], found.test_labels[half:]) if pate else (found.test, found.test_labels)
    return Material(
        settings.data,
        found.train,
        found.train_labels,
        classes,
        test=tested,
        public=found.test[:half] if pate else None,
        published=True,
    )


def _of_table(settings: Settings, found: bounds.Found | None) -> Material:
    assert settings.table is not None
    assert settings.label is not None
    table = tables.read(settings.table)
    tables.column_of(table, settings.label)
    schema, preparation = _schema(settings), ()  # type: tables.Schema, tuple[Event, ...]
    if settings.private_bounds and (columns := bounds.unknown(schema)):
        if found is None:
            found = bounds.find(table, schema, epsilon=settings.epsilon, seed=settings.test_seed)
        schema, preparation = bounds.applied(schema, found), (bounds.event(len(columns), settings.epsilon),)
    test = None if settings.test is None else tables.read(settings.test)
    public = None if settings.public is None else tables.read(settings.public)
    if settings.method == "pate" and public is None:
        raise InvalidArgument("--method pate on a table: want --public with rows that need no protection")
    return Material(
        Path(settings.table).name,
        schema.encode(table),
        schema.labels(table),
        schema.classes,
        test=None if test is None else (schema.encode(test), schema.labels(test)),
        public=None if public is None else schema.encode(public),
        schema=schema,
        found=found,
        preparation=preparation,
    )


def _schema(settings: Settings) -> tables.Schema:
    assert settings.table is not None
    path = schema_path(settings.table) if settings.schema is None else Path(settings.schema)
    if not path.is_file():
        raise InvalidArgument(
            f"{path}: no schema of public facts; want one: terrine schema {settings.table} --label {settings.label}"
        )
    schema = tables.Schema.load(path)
    if schema.label != settings.label:
        raise InvalidArgument(f"{path} is for label {schema.label!r}, not {settings.label!r}: want a schema for that")
    paid = bounds.unknown(schema) if settings.private_bounds else []
    if unsure := [name for name in schema.unconfirmed if name not in paid]:
        names = ", ".join(unsure[:6])
        raise InvalidArgument(
            f"{path}: drafted from the rows and not confirmed: {names}; check each, then set confirmed = true "
            "(bounds taken from the data leak), or run terrine schema again and answer its questions"
        )
    return schema
