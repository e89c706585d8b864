"""Trainings: price, submit, resume, and what may be handed on of a finished one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from terrine.gateway import answers, requests
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import DatasetName, Identifier, TrainBody
from terrine.gateway.policy import GuardedRoute, Where, allow

router = APIRouter(route_class=GuardedRoute)
_REFUSED: dict[int | str, dict[str, Any]] = {
    409: {"model": answers.Problem, "description": "the budget does not hold it, or it is in another state"}
}
_ZIP: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}, "description": "ZIP"},
    **_REFUSED,
}


@router.post("/datasets/{name}/trainings/price", response_model=answers.TrainingQuote, responses=_REFUSED)
@allow("analyst", where=Where.DATASET)
def price(http: Request, caller: Asker, name: DatasetName, body: TrainBody) -> dict[str, Any]:
    """What a training would cost: free, looks at no row."""
    return http.app.state.gateway.trainings.price(caller, name, body)  # type: ignore[no-any-return]


@router.post("/datasets/{name}/trainings", response_model=answers.Waiting, status_code=202, responses=_REFUSED)
@allow("analyst", where=Where.DATASET)
def submit(http: Request, caller: Asker, name: DatasetName, body: TrainBody) -> dict[str, Any]:
    """Take a training in: it is charged when it starts, or waits for approval beyond the allowance."""
    found: dict[str, Any] = http.app.state.gateway.trainings.submit(caller, name, body)
    http.state.subject = found["request"]
    return found


@router.post("/requests/{request}/resume", response_model=answers.RequestShown, responses=_REFUSED)
@allow("analyst", "owner", where=Where.REQUEST)
def resume(http: Request, caller: Asker, request: Identifier) -> dict[str, Any]:
    """Go on with a training that was charged and then ended: by the same receipt, at no new cost."""
    gateway = http.app.state.gateway
    with gateway.database.read() as session:
        row = requests.find(session, request)
    gateway.trainings.resume(row)
    return gateway.request(caller, request)  # type: ignore[no-any-return]


@router.get("/requests/{request}/result", response_model=None, responses=_ZIP)
@allow("analyst", where=Where.REQUEST, logged=True)
def result(http: Request, caller: Asker, request: Identifier) -> FileResponse:
    """A ZIP archive of what may be handed on of a finished training, for `terrine verify`."""
    gateway = http.app.state.gateway
    with gateway.database.read() as session:
        row = requests.find(session, request)
    return FileResponse(gateway.trainings.result(row), media_type="application/zip", filename=f"{request}.zip")
