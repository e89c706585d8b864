"""What was asked for: the public choices of a run, as its folder keeps them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from terrine import check
from terrine.errors import InvalidArgument

SETS = ("digits", "mnist", "fashion-mnist", "cifar-10", "adult")
METHODS = ("sgd", "pate")
LOSSES = ("squared", "absolute")
LEAST_SQUARES = "least-squares"
"""The model that is made from one release instead of a training."""
TRAINED_ONLY = ("lot", "epochs", "clip", "learning_rate", "device", "tune", "gradient_canaries", "loss")
_RANGES = {"epochs": (1e-12, 1e6), "learning_rate": (1e-12, 1e6), "tune": (2, 10_000)}
"""Beyond, a training ends in numbers that are none, or in no time at all."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's public choices. What is None is chosen by `recipes`, from public numbers only.

    Raises:
        InvalidArgument: a value is out of range, or two contradict each other.
    """

    epsilon: float
    data: str | None = None
    """A named data set; or `table`, the path of a private table with its `label` and `schema`."""
    table: str | None = None
    label: str | None = None
    schema: str | None = None
    text_model: str | None = None
    """The folder of the sentence encoder that the schema names, where it names one."""
    person: str | None = None
    """The table's column that says whose a row is: what is protected is then a person with all its rows."""
    rows_per_person: int | None = None
    """How many rows of a person count at a time; None is 10."""
    test: str | None = None
    """A table that needs no protection, to measure accuracy on."""
    public: str | None = None
    """PATE on a table: rows that need no protection, without labels, for the student."""
    delta: float | None = None
    delta_at_most: float | None = None
    """The delta of the account that is charged: a delta that is not given is at most this."""
    method: str = "sgd"
    model: str | None = None
    lot: int | None = None
    epochs: float | None = None
    clip: float | None = None
    learning_rate: float | None = None
    loss: str | None = None
    """For a label that is a number: squared (None) or absolute."""
    device: str | None = None
    """Where DP-SGD trains: cpu, cuda, mps; None is the CPU."""
    tune: int | None = None
    """Tune learning rate and clipping bound: the best of a secret number of runs, so many expected."""
    teachers: int | None = None
    queries: int | None = None
    private_bounds: bool = False
    """Find the bounds that the schema does not confirm privately, for a tenth of epsilon."""
    accuracy_within: float | None = None
    """How many points a paid-for accuracy may be off, 95% sure; None is 2, 0 is no accuracy."""
    audit: int | None = None
    """How many private rows a fair coin leaves in or out for the audit; None chooses, 0 is no audit."""
    gradient_canaries: int | None = None
    """Audit by a twin as well: so many gradient canaries in a second training by the same plan; None is no twin."""
    weak_guarantee: bool = False
    """Train also where epsilon is above 20 or delta is not below 1/rows: a guarantee that means little."""
    seed: int | None = None
    """For tests only: lots, coins and noise from a seed; the event is stamped so."""

    def __post_init__(self) -> None:
        check.positive("epsilon", self.epsilon, "how much may be learned about one person; 1 to 8 are usual")
        if self.delta is not None:
            check.open_unit("delta", self.delta)
        if (self.data is None) == (self.table is None):
            raise InvalidArgument("want a private TABLE, or --data with the name of a data set: one of the two")
        if self.data is not None and self.data not in SETS:
            raise check.refuse("data", self.data, f"one of {', '.join(SETS)}", "a table is given by its path")
        if self.table is not None and self.label is None:
            raise InvalidArgument(f"{self.table}: want --label with the name of the column to predict")
        if self.person is not None and (self.table is None or self.person == self.label):
            raise InvalidArgument("--person: want a column of a private TABLE, other than the label")
        if self.rows_per_person is not None and self.person is None:
            raise InvalidArgument("--rows-per-person: want --person with the column that says whose a row is")
        if self.private_bounds and (self.table is None or self.method != "sgd"):
            raise InvalidArgument("--private-bounds: want a table and --method sgd")
        if self.method not in METHODS:
            raise check.refuse("method", self.method, f"one of {', '.join(METHODS)}")
        self._check_optional()

    def _check_optional(self) -> None:
        least = {"lot": 1, "tune": 2, "teachers": 2, "queries": 1, "audit": 0, "rows_per_person": 1}
        least["gradient_canaries"] = 1
        for name, at_least in least.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check.whole(name, getattr(self, name), at_least=at_least))
        if self.clip is not None:
            check.moderate("clip", self.clip)
        for name, (smallest, largest) in _RANGES.items():
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), smallest, largest)
        if self.accuracy_within:
            _check_range("accuracy_within", self.accuracy_within, 0.01, 100.0, "points of per cent; 0 for no accuracy")
        if self.loss is not None and self.loss not in LOSSES:
            raise check.refuse("loss", self.loss, f"one of {', '.join(LOSSES)}")
        of_sgd = ("lot", "epochs", "clip", "learning_rate", "device", "tune", "gradient_canaries")
        of_pate = ("teachers", "queries")
        of_other = of_sgd if self.method == "pate" else of_pate
        if given := [name for name in of_other if getattr(self, name) is not None]:
            raise InvalidArgument(f"{given[0]}={getattr(self, given[0])}: not for --method {self.method}")
        if self.model == LEAST_SQUARES and (
            given := [name for name in TRAINED_ONLY if getattr(self, name) is not None]
        ):
            raise InvalidArgument(
                f"{given[0]}={getattr(self, given[0])}: not for --model {LEAST_SQUARES}, one release; want it "
                "left out, or --model linear"
            )
        if self.tune is not None and self.gradient_canaries is not None:
            raise InvalidArgument("--tune with --gradient-canaries: a twin has one plan; want one of the two")
        if self.tune is not None and self.clip is not None and self.learning_rate is not None:
            raise InvalidArgument("--tune with --clip and --learning-rate: nothing is left to tune; want one of them")

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """The fields in which a kept run differs from these settings."""
        mine = self.as_dict()
        return [name for name in mine if mine[name] != other.get(name)]


def _check_range(name: str, value: float, least: float, most: float, hint: str = "") -> None:
    if not least <= check.number(name, value) <= most:
        raise check.refuse(name, value, f"between {least:g} and {most:g}", hint)
