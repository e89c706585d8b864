"""What a run learns from: private rows with labels, and whatever needs no protection.

Data are opened first: how many rows there are, what shape an input has, which classes. These facts are public, and all
that a plan and its price are made of. `Opened.material` then looks at the rows: after the charge.

Of a named data set the training part plays the private data. Its published test part needs no protection: accuracy
is measured on it, and PATE's student learns from the inputs of its first half (and is then measured on the second).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check, datasets, tables
from terrine.common.people import People
from terrine.common.targets import TargetBounds
from terrine.errors import InvalidArgument, PeopleUnprotected
from terrine.pipeline import bounds
from terrine.pipeline.memory import room
from terrine.pipeline.settings import Settings
from terrine.pipeline.units import Units

Integers = NDArray[np.int64]
_DIGITS_FOR_TESTING = 597
_LEAST = 10
_ROWS_PER_PERSON = 10


@dataclass(frozen=True, eq=False)
class Material:
    """Private rows, and public ones where there are any."""

    name: str
    inputs: NDArray[Any]
    labels: NDArray[Any]
    """Places among the classes; or numbers, scaled from the target's bounds to [-1, 1]."""
    classes: tuple[str, ...]
    units: Units
    test: tuple[NDArray[Any], NDArray[Any]] | None = None
    public: NDArray[Any] | None = None
    schema: tables.Schema | None = None
    target: TargetBounds | None = None
    """The bounds of a label that is a number."""
    published: bool = False
    """Whether the private rows are in truth a published data set, so that a baseline may be shown."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A run's data, opened and not looked at: its public facts, and the way to the rows.

    Raises:
        InvalidArgument: there are too few rows, or people.
    """

    units: Units
    shape: tuple[int, ...]
    """The shape of one input."""
    classes: int
    tested: bool
    """Whether there are rows that need no protection, to measure accuracy on."""
    public: int = 0
    """How many public inputs there are for a student."""
    schema: tables.Schema | None = None
    target: TargetBounds | None = None
    """The bounds of a label that is a number; there are no classes then."""
    unbounded: int = 0
    """How many columns are to be bounded privately."""
    look: Callable[[bounds.Found], Material] = field(repr=False, kw_only=True)
    """The material, encoded with bounds that were found privately; to be called after the charge."""
    find: Callable[[], bounds.Found] = field(repr=False, kw_only=True, default=dict)
    """Find those bounds: this draws, after the charge."""

    @property
    def fingerprint(self) -> str:
        """A SHA-256 hash of the public facts."""
        known: list[Any] = [self.units.count, "people" if self.units.people else "rows", list(self.shape), self.classes]
        if self.target is not None:
            known.append([self.target.low, self.target.high])
        columns = {} if self.schema is None else self.schema.as_dict()["columns"]
        sure = {name: column if column["confirmed"] else None for name, column in columns.items()}  # others may leak
        text = json.dumps([*known, None if self.schema is None else list(self.schema.classes), sure], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def length(self) -> float | None:
        """A public bound of a row's length, for a target that is a number; None where rows are scaled one by one."""
        if self.target is None or self.schema is None:
            return None
        return self.schema.length

    def __post_init__(self) -> None:
        if self.units.count < _LEAST:
            what = "rows" if self.units.people is None else "people"
            raise check.refuse(what, self.units.count, f"at least {_LEAST} private {what}")


def open_data(settings: Settings) -> Opened:
    """The data that the settings name.

    Raises:
        InvalidArgument: a file is missing or is not what it should be, or the schema is not confirmed.
    """
    return _of_table(settings) if settings.table is not None else _of_set(settings)


def _of_set(settings: Settings) -> Opened:
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
    pate, units = settings.method == "pate", Units(len(found.train))
    material = Material(
        settings.data,
        found.train,
        found.train_labels,
        classes,
        units,
        test=(found.test[half:], found.test_labels[half:]) if pate else (found.test, found.test_labels),
        public=found.test[:half] if pate else None,
        published=True,
    )
    shape = tuple(found.train.shape[1:])
    return Opened(units, shape, len(classes), True, half if pate else 0, look=lambda _: material)


def _of_table(settings: Settings) -> Opened:
    assert settings.table is not None
    assert settings.label is not None
    loaded = _loaded(settings)
    table = tables.open_table(settings.table, None if loaded is None else loaded.file)
    tables.check_label(table, settings.label)
    if settings.person is not None and settings.person not in table.column_names:
        raise InvalidArgument(f"--person {settings.person}: no such column; want the one that says whose a row is")
    schema = _schema(settings, loaded)
    table = table.labelled(settings.label, schema.classes)
    units, encoder = _units(settings, table), _encoder(settings, schema)
    test, public = (None if one is None else schema.open_table(one) for one in (settings.test, settings.public))
    if settings.method == "pate" and public is None:
        raise InvalidArgument("--method pate on a table: want --public with rows that need no protection")
    for one in (table, test, public):
        if one is not None:
            schema.check_columns(one)
    target = None if schema.target is None else TargetBounds(schema.target.low, schema.target.high)
    if target is not None and (settings.method == "pate" or settings.tune is not None):
        raise InvalidArgument(f"label {schema.label!r} is a number: want --method sgd, without --tune")
    if target is None and settings.loss is not None:
        raise InvalidArgument(f"--loss {settings.loss}: label {schema.label!r} is a class; want it for a number only")

    def labels(one: Any) -> NDArray[Any]:
        return schema.labels(one) if target is None else target.scaled(schema.numbers(one))

    tested = None if test is None else labels(test)

    def look(found: bounds.Found) -> Material:
        known = bounds.applied(schema, found) if settings.private_bounds else schema
        return Material(
            check.printable(Path(settings.table or "").name),
            known.encode(table, encoder=encoder, room=room),
            labels(table),
            known.classes,
            units,
            test=None if tested is None else (known.encode(test, encoder=encoder), tested),
            public=None if public is None else known.encode(public, encoder=encoder),
            schema=known,
            target=target,
        )

    return Opened(
        units,
        (schema.width,),
        len(schema.classes),
        tested=test is not None,
        public=0 if public is None else public.num_rows,
        schema=schema,
        target=target,
        unbounded=len(bounds.unknown(schema)) if settings.private_bounds else 0,
        look=look,
        find=lambda: bounds.find(table, schema, units, epsilon=settings.epsilon, seed=settings.seed),
    )


def _units(settings: Settings, table: Any) -> Units:
    """Who is protected.

    Raises:
        InvalidArgument: there is no such column, or a row is nobody's.
    """
    if settings.person is None:
        if found := tables.repeated_ids(table, without=settings.label):
            warnings.warn(
                f"column {found!r} looks like an id and its values repeat: people with several rows are protected less "
                f"than epsilon={settings.epsilon:g}; want --person {found}, or leave it out if it is none",
                PeopleUnprotected,
                stacklevel=2,
            )
        return Units(table.num_rows)
    try:
        people = People(tables.ids_of(table, settings.person), table.num_rows)
    except InvalidArgument as error:
        raise InvalidArgument(f"--person {settings.person}: {error}") from None
    return Units(table.num_rows, people, settings.rows_per_person or _ROWS_PER_PERSON)


def _encoder(settings: Settings, schema: tables.Schema) -> tables.Encoder | None:
    """The sentence encoder that the schema wants, where it wants one."""
    found = tables.load_encoder(settings.text_model) if settings.text_model and schema.encoder else None
    schema.check_encoder(found)
    return found


def _schema_file(settings: Settings) -> Path:
    assert settings.table is not None
    return tables.schema_path(settings.table) if settings.schema is None else Path(settings.schema)


def _loaded(settings: Settings) -> tables.Schema | None:
    """The schema as it is in its file, where there is one: it says how the table is written."""
    path = _schema_file(settings)
    return tables.Schema.load(path) if path.is_file() else None


def _schema(settings: Settings, schema: tables.Schema | None) -> tables.Schema:
    """The schema, if it is for this table and all that it says is known.

    Raises:
        InvalidArgument: there is none, or it is for another label, or a fact is not confirmed.
    """
    path = _schema_file(settings)
    if schema is None:
        raise InvalidArgument(
            f"{path}: no schema of public facts; want one: terrine schema {settings.table} --label {settings.label}"
        )
    if schema.label != settings.label:
        raise InvalidArgument(f"{path} is for label {schema.label!r}, not {settings.label!r}: want a schema for that")
    if settings.person is not None:  # whose a row is says nothing about it
        columns = {name: column for name, column in schema.columns.items() if name != settings.person}
        schema = dataclasses.replace(schema, columns=columns)
    paid = bounds.unknown(schema) if settings.private_bounds else []
    if nobody := [name for name in schema.unknown if name not in paid]:
        raise InvalidArgument(
            f"{path}: the bounds of {', '.join(nobody[:6])} are unknown; want --private-bounds, which finds and pays "
            'for them, or kind = "ignored", which leaves them out'
        )
    if unsure := [name for name in schema.unconfirmed if name not in paid]:
        names = ", ".join(unsure[:6])
        raise InvalidArgument(
            f"{path}: drafted from the rows and not confirmed: {names}; check each, then set confirmed = true "
            "(bounds taken from the data leak), or run terrine schema again and answer its questions"
        )
    return schema
