"""What the server answers, as the OpenAPI document says it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from terrine.gateway.bodies import Role, State

Json = dict[str, Any]


class Problem(BaseModel):
    """Why something was not done, in one line."""

    error: str
    charged: bool | None = None
    request: str | None = None
    state: str | None = None


class Health(BaseModel):
    """Whether the server can reach its database."""

    ok: bool
    version: str


class PriceShown(BaseModel):
    """Epsilon and delta."""

    epsilon: float
    delta: float


class Dataset(BaseModel):
    """What everyone in its scope may know of a data set."""

    dataset: str
    about: str
    tables: list[str]
    budget: PriceShown
    training: Json | None
    registered: float


class ColumnShown(BaseModel):
    """A column's name and type."""

    name: str
    type: str


class TableShown(BaseModel):
    """A table's public facts, and rows that were made up from them."""

    table: str
    public: bool
    person: str | None
    rows: int | None
    groups: int | None
    columns: list[ColumnShown]
    example: list[list[Any]]


class DatasetShown(Dataset):
    """A data set with its schemas."""

    schemas: list[TableShown]


class QuoteShown(BaseModel):
    """What a question would cost, and how good its answer would be."""

    dataset: str
    epsilon: float
    delta: float
    mechanism: str
    reason: str
    half_widths: dict[str, float | None]
    cells: list[Json]
    bounds: list[str]
    event: Json
    in_archive: bool
    fits_budget: bool
    fits_allowance: bool
    allowance_left: float
    allowance_delta_left: float


class TrainingQuote(BaseModel):
    """What a training would cost."""

    dataset: str
    epsilon: float
    delta: float
    event: Json
    fits_budget: bool
    fits_allowance: bool
    allowance_left: float
    allowance_delta_left: float


class TableAnswer(BaseModel):
    """A noisy table: beside each noisy column stands its half-width."""

    columns: list[str]
    rows: list[list[Any]]
    half_widths: dict[str, float]
    notes: list[str]


class Mock(BaseModel):
    """An answer from made-up rows."""

    dataset: str
    mock: Literal[True]
    answer: TableAnswer


class Proof(BaseModel):
    """What an answer cost, and the ledger's row that says so."""

    price: PriceShown
    event: Json
    charge: Json
    head: str
    request: str


class Answered(BaseModel):
    """An answer that was paid for; from the archive it costs nothing again."""

    request: str
    dataset: str
    member: str
    state: Literal["answered"]
    asked: Json
    answer: TableAnswer
    proof: Proof
    signature: Json | None
    from_archive: bool
    cost: PriceShown


class Waiting(BaseModel):
    """A request that waits for approval, or a training that was taken in."""

    request: str
    dataset: str
    state: State
    charged: bool
    price: PriceShown
    said: str


class RequestShown(BaseModel):
    """A request and what became of it."""

    request: str
    dataset: str
    member: str
    kind: Literal["query", "training"]
    state: State
    asked: Json
    purpose: str
    reason: str
    price: PriceShown
    charge: str | None
    charged: bool
    made: float
    changed: float
    decided_by: str | None
    decision: str
    progress: str
    said: str
    answer: Json | None


class BalanceShown(BaseModel):
    """A data set's budget: what was spent by everyone together, what is left, and the caller's own part."""

    dataset: str
    budget: PriceShown
    spent: float
    """Epsilon that holds for everything together at the budget's delta."""
    largest: float
    """The largest epsilon that one more release may have."""
    used: float
    """The share of the budget's room for charges that is used up."""
    allowance: float | None
    allowance_spent: float | None
    allowance_delta: float | None
    """The delta that comes with the allowance: the same share of the budget's."""
    allowance_delta_spent: float | None


class Member(BaseModel):
    """Somebody with a role for a data set."""

    dataset: str
    member: str
    role: Role
    allowance: float
    allowance_delta: float
    spent: float
    spent_delta: float
    since: int
    revoked: int
    by: str


class Token(BaseModel):
    """A token, without its secret."""

    token: str
    member: str
    role: Role
    dataset: str
    by: str
    issued: int
    expires: int
    revoked: int


class NewToken(Token):
    """A token with its secret, which is shown this once."""

    secret: str


class Me(BaseModel):
    """Who the caller is."""

    member: str
    role: Role
    dataset: str
    token: str


class Spending(BaseModel):
    """Who spent how much of a data set: members' sums, and every charge of the ledger."""

    dataset: str
    balance: BalanceShown
    members: list[Json]
    charges: list[Json]


class Log(BaseModel):
    """The access log, and what is wrong with its chain: nothing, if `broken` is empty."""

    entries: list[Json]
    broken: str


class Done(BaseModel):
    """It was done."""

    done: Literal[True] = True
