"""Price, mock and ask: what analysts do. Answers leave at ticks, where the configuration sets them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from terrine.gateway import answers, asking
from terrine.gateway.api.door import Asker
from terrine.gateway.bodies import AskBody, DatasetName, Identifier, QuestionBody
from terrine.gateway.policy import GuardedRoute, Where, allow
from terrine.gateway.refusals import answer_to

router = APIRouter(route_class=GuardedRoute)
_CHARGED: dict[int | str, dict[str, Any]] = {
    202: {"model": answers.Waiting, "description": "beyond the allowance: it waits for approval"},
    409: {"model": answers.Problem, "description": "the budget does not hold it; nothing was charged"},
    500: {"model": answers.Problem, "description": "failed after the charge: it stays charged"},
}
_NOT_YET: dict[int | str, dict[str, Any]] = {409: {"model": answers.Problem, "description": "there is no answer"}}


@router.post("/datasets/{name}/price", response_model=answers.QuoteShown)
@allow("analyst", where=Where.DATASET)
def price(request: Request, caller: Asker, name: DatasetName, body: QuestionBody) -> dict[str, Any]:
    """What a question would cost and how good its answer would be: free, looks at no row."""
    return request.app.state.gateway.asking.price(caller, name, body)  # type: ignore[no-any-return]


@router.post("/datasets/{name}/mock", response_model=answers.Mock)
@allow("analyst", where=Where.DATASET)
def mock(request: Request, caller: Asker, name: DatasetName, body: QuestionBody) -> dict[str, Any]:
    """The answer on made-up rows: free, and about nobody."""
    return request.app.state.gateway.asking.mock(name, body)  # type: ignore[no-any-return]


@router.post("/datasets/{name}/ask", response_model=answers.Answered, responses=_CHARGED)
@allow("analyst", where=Where.DATASET)
async def ask(request: Request, caller: Asker, name: DatasetName, body: AskBody) -> Any:
    """Charge a question, then answer it; the same question again is answered from the archive, at no cost."""
    gateway = request.app.state.gateway
    try:
        found = await run_in_threadpool(gateway.asking.ask, caller, name, body)
    except Exception as error:
        if answer_to(error)[0] == 500:
            await at_tick(gateway.configuration.tick)
        raise
    request.state.subject = found["request"]
    if found["state"] == "waiting":
        from fastapi.responses import JSONResponse

        return JSONResponse(found, status_code=202)
    if not found["from_archive"]:
        await at_tick(gateway.configuration.tick)
    return found


@router.get("/requests/{request}/answer", response_model=answers.Answered, responses=_NOT_YET)
@allow("analyst", where=Where.REQUEST)
def answer(http: Request, caller: Asker, request: Identifier) -> dict[str, Any]:
    """The answer to a question that was approved, or whose answer was lost on the way: from the archive."""
    return asking.collected(http.app.state.gateway.database, caller, request)


async def at_tick(seconds: float) -> None:
    """Wait for the next whole multiple of `seconds`: when an answer leaves tells less of how long it took."""
    if seconds:
        await asyncio.sleep(seconds - time.time() % seconds)
