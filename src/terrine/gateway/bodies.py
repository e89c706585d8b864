"""What callers may send: named, typed and bounded; unknown names are refused, nothing is guessed.

No field names a file or holds code. A data set names its source among those of the configuration, or a file in the
data folder by its plain name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, field_validator

from terrine import check
from terrine.check import LARGEST_EPSILON, MODERATE
from terrine.queries.parsing import LONGEST

DatasetName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$", strict=True)]
"""Plain enough for addresses, files and logs."""
MemberName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$", strict=True)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$", strict=True)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", strict=True)]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=200, strict=True)]
Epsilon = Annotated[float, Field(ge=1e-6, le=LARGEST_EPSILON, strict=True)]
Delta = Annotated[float, Field(ge=1e-30, lt=1, strict=True)]
Contribution = Annotated[int, Field(ge=1, le=10**6, strict=True)]


def _said(value: str) -> str:
    return check.text("text", value)


Words = Annotated[str, StringConstraints(max_length=500, strict=True), AfterValidator(_said)]
"""A line for people: printable, as the ledger takes it."""
Role = Literal["owner", "analyst", "officer"]
State = Literal["waiting", "denied", "cancelled", "reserved", "charged", "answered", "failed", "refused"]


class Body(BaseModel):
    """Unknown names, nan and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TableBody(Body):
    """One table: of people's rows, or public."""

    public: bool = False
    person: ColumnName | None = None
    rows: Contribution | None = None
    groups: Contribution | None = None
    complete: Annotated[tuple[ColumnName, ...], Field(max_length=200)] = ()


class BudgetBody(Body):
    """What one person may lose by everything that is ever answered from a data set."""

    epsilon: Annotated[float, Field(gt=0, le=1e3)]
    delta: Annotated[float, Field(ge=0, lt=1)] = 0.0


class TrainingTable(Body):
    """What trainings may learn from. That it is lent makes the number of its people public."""

    table: FileName
    """A file in the data folder; its facts lie beside it, in NAME.schema.toml, confirmed."""
    person: ColumnName
    labels: Annotated[tuple[ColumnName, ...], Field(min_length=1, max_length=50)]
    rows_per_person: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 10
    test: FileName | None = None
    """A table that needs no protection, to measure accuracy on."""


class DatasetBody(Body):
    """A data set as its owner registers it."""

    source: FileName
    """A name of the configuration's sources, or a file in the data folder."""
    tables: Annotated[dict[ColumnName, TableBody], Field(min_length=1, max_length=50)]
    budget: BudgetBody
    training: TrainingTable | None = None
    about: Words = ""


class QuestionBody(Body):
    """A question and its price in privacy, as `Session.sql` takes them."""

    sql: Annotated[str, StringConstraints(min_length=1, max_length=LONGEST, strict=True)]
    epsilon: Epsilon
    delta: Delta | None = None
    bounds: Annotated[dict[ColumnName, tuple[float, float]], Field(max_length=50)] | None = None
    keys: Annotated[dict[ColumnName, list[bool | int | float | str] | Literal["private"]], Field(max_length=20)] | (
        Literal["private"] | None
    ) = None
    bins: Annotated[dict[ColumnName, list[float]], Field(max_length=20)] | None = None
    min_group: Contribution | None = None

    @field_validator("keys", mode="after")
    @classmethod
    def _whole_characters(cls, keys: Any) -> Any:
        """Half of a character would pass every check of values and fail in the engine, after the charge."""
        values = [one for some in keys.values() for one in some] if isinstance(keys, dict) else []
        if any(
            isinstance(one, str) and not one.isascii() and any("\ud800" <= c <= "\udfff" for c in one) for one in values
        ):
            raise ValueError("want text of whole characters")
        return keys


class AskBody(QuestionBody):
    """A question to be charged and answered."""

    purpose: Words = ""
    """What for, as the ledger keeps it."""
    reason: Words = ""
    """Why it should be answered even beyond the allowance: then it waits for approval."""
    fresh: bool = False
    """Pay again, instead of taking the same answer from the archive."""


class TrainBody(Body):
    """A training by named settings."""

    label: ColumnName
    epsilon: Epsilon
    delta: Delta | None = None
    model: Literal["linear", "mlp"] | None = None
    lot: Annotated[int, Field(ge=1, le=10**6, strict=True)] | None = None
    epochs: Annotated[float, Field(ge=MODERATE[0], le=1_000)] | None = None
    clip: Annotated[float, Field(ge=MODERATE[0], le=1e6)] | None = None
    learning_rate: Annotated[float, Field(ge=MODERATE[0], le=1e3)] | None = None
    tune: Annotated[int, Field(ge=2, le=50, strict=True)] | None = None
    rows_per_person: Annotated[int, Field(ge=1, le=10_000, strict=True)] | None = None
    audit: Annotated[int, Field(ge=0, le=10**5, strict=True)] | None = None
    purpose: Words = ""
    reason: Words = ""

    def settings(self) -> dict[str, Any]:
        """Those of the pipeline's settings that an analyst chooses."""
        return self.model_dump(exclude={"purpose", "reason", "rows_per_person"})


class MemberBody(Body):
    """A loan: to whom is in the address."""

    role: Role
    allowance: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Epsilon that an analyst may spend without asking anyone: a further limit, never a further budget."""


class TokenBody(Body):
    """A token to be issued to a member."""

    member: MemberName
    dataset: DatasetName | Literal["*"]
    days: Annotated[float, Field(gt=0, le=3_650)] = 90.0


class DecisionBody(Body):
    """Why a request is approved or denied."""

    reason: Words = ""


Record = dict[str, JsonValue]
"""A JSON object."""
