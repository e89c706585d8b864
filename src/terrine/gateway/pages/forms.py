"""What forms send, as the bodies that the API takes: pages have no checks of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends
from pydantic import TypeAdapter, ValidationError

from terrine.errors import TerrineError
from terrine.gateway.bodies import AskBody, DatasetBody, DatasetName, MemberBody, MemberName, TokenBody, TrainBody
from terrine.gateway.configuration import problems
from terrine.gateway.policy import form_of
from terrine.gateway.refusals import Refused, answer_to

Form = Annotated[dict[str, str], Depends(form_of)]
_DATASET: TypeAdapter[str] = TypeAdapter(DatasetName)
_MEMBER: TypeAdapter[str] = TypeAdapter(MemberName)
TABLES = 3
"""How many tables the form for a data set has room for; `gateway.toml` and the API take more."""


@dataclass(frozen=True)
class Tried:
    """What came of a form: a value, or why not."""

    value: Any = None
    status: int = 200
    said: str = ""
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it was refused."""
        return self.status >= 400


def tried(act: Callable[[], Any]) -> Tried:
    """Do what a form asks for; a refusal goes back to its page, but one that says the page is not the caller's."""
    try:
        return Tried(act())
    except ValidationError as error:
        return Tried(status=422, said=problems(error.errors()))
    except Refused as error:
        if error.status in (401, 404):
            raise
        return Tried(status=error.status, said=str(error), told=error.told)
    except TerrineError as error:
        status, told = answer_to(error)
        return Tried(status=status, said=str(told["error"]), told=told)


def question(form: dict[str, str]) -> AskBody:
    """The playground's question."""
    keys: Any = "private" if form.get("groups") == "private" else _lines(form, "keys", list)
    told = {
        "sql": form.get("sql", "").replace("\r\n", "\n"),
        "epsilon": _number(form, "epsilon"),
        "delta": _number(form, "delta"),
        "bounds": _lines(form, "bounds", _pair),
        "keys": keys,
        "bins": _lines(form, "bins", _numbers),
        "purpose": form.get("purpose", "").strip(),
        "reason": form.get("reason", "").strip(),
        "fresh": form.get("fresh") == "yes",
    }
    return AskBody.model_validate({name: value for name, value in told.items() if value is not None})


def training(form: dict[str, str]) -> TrainBody:
    """The settings of a training."""
    told: dict[str, Any] = {name: form.get(name, "").strip() for name in ("label", "model", "purpose", "reason")}
    told |= {name: _number(form, name) for name in ("epsilon", "delta", "epochs", "clip", "learning_rate")}
    told["lot"] = _whole(form, "lot")
    kept = {name: value for name, value in told.items() if value not in (None, "")}
    return TrainBody.model_validate(kept)


def dataset(form: dict[str, str]) -> DatasetBody:
    """A data set to be registered."""
    tables: dict[str, dict[str, Any]] = {}
    for place in range(1, TABLES + 1):
        if not (name := form.get(f"table{place}", "").strip()):
            continue
        if name in tables:
            raise Refused(422, f"table {name}: stands twice; want every table once")
        if form.get(f"public{place}") == "yes":
            tables[name] = {"public": True}
            continue
        told = {"person": form.get(f"person{place}", "").strip() or None, "rows": _whole(form, f"rows{place}")}
        tables[name] = told | {"groups": _whole(form, f"groups{place}")}
    body: dict[str, Any] = {
        "source": form.get("source", "").strip(),
        "tables": tables,
        "budget": {"epsilon": _number(form, "epsilon"), "delta": _number(form, "delta") or 0.0},
        "about": form.get("about", "").strip(),
    }
    if form.get("training", "").strip():
        body["training"] = {
            "table": form["training"].strip(),
            "person": form.get("training_person", "").strip(),
            "labels": _names(form, "labels"),
            "rows_per_person": _whole(form, "training_rows") or 10,
        }
    return DatasetBody.model_validate(body)


def loan(form: dict[str, str]) -> MemberBody:
    """A role, and an analyst's allowance."""
    role = form.get("role", "")
    allowance = (_number(form, "allowance") or 0.0) if role == "analyst" else 0.0
    return MemberBody.model_validate({"role": role, "allowance": allowance})


def token(form: dict[str, str], dataset: str) -> TokenBody:
    """A token for a member."""
    return TokenBody.model_validate(
        {"member": form.get("member", "").strip(), "dataset": dataset, "days": _number(form, "days")}
    )


def dataset_name(form: dict[str, str]) -> str:
    """What a new data set is to be called."""
    wanted = "lower-case letters, digits, - and _, at most 63, beginning with a letter"
    return _plain(form, "name", _DATASET, wanted)


def member_name(form: dict[str, str]) -> str:
    """To whom something is lent."""
    wanted = "letters, digits and . _ @ -, at most 64, beginning with a letter or digit"
    return _plain(form, "member", _MEMBER, wanted)


def reason(form: dict[str, str]) -> str:
    """Why somebody decided so: on a page it has to be said."""
    said = " ".join(form.get("reason", "").split())
    if not said:
        raise Refused(422, "want a reason: it is kept with the request, and the analyst reads it")
    return said


def _plain(form: dict[str, str], name: str, kind: TypeAdapter[str], wanted: str) -> str:
    try:
        return kind.validate_python(form.get(name, "").strip())
    except ValidationError:
        raise Refused(422, f"{name}: want {wanted}") from None


def _number(form: dict[str, str], name: str) -> float | None:
    given = form.get(name, "").strip()
    if not given:
        return None
    try:
        return float(given)
    except ValueError:
        raise Refused(422, f"{name}: is no number; want one such as 0.1") from None


def _whole(form: dict[str, str], name: str) -> int | None:
    value = _number(form, name)
    if value is None:
        return None
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise Refused(422, f"{name}: want a whole number")
    return int(value)


def _names(form: dict[str, str], name: str) -> list[str]:
    return [one.strip() for one in form.get(name, "").split(",") if one.strip()]


def _lines(form: dict[str, str], name: str, read: Callable[[list[str]], Any]) -> dict[str, Any] | None:
    """Lines of `column = value, value`."""
    found: dict[str, Any] = {}
    for line in form.get(name, "").splitlines():
        if not line.strip():
            continue
        column, equals, values = (part.strip() for part in line.partition("="))
        if not (column and equals and values) or column in found:
            raise Refused(422, f"{name}: want one line for each column, such as {_LIKE[name]}")
        try:
            found[column] = read([one.strip() for one in values.split(",")])
        except ValueError:
            raise Refused(422, f"{name}: want numbers, such as {_LIKE[name]}") from None
    return found or None


def _pair(values: list[str]) -> tuple[float, float]:
    lower, upper = values
    return float(lower), float(upper)


def _numbers(values: list[str]) -> list[float]:
    return [float(one) for one in values]


_LIKE = {"keys": "region = N, S", "bounds": "cost = 0, 10000", "bins": "age = 0, 18, 65, 120"}
