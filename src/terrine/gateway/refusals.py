"""What the server says when it does not do what was asked: a status, one line, and what it means for the budget.

Nothing here repeats an engine's or a database's own words: they may quote private rows, paths or addresses. Those go
to the server's log.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException

from terrine.errors import (
    BudgetExceeded,
    EngineFailed,
    InvalidArgument,
    LedgerDamaged,
    LedgerUnavailable,
    MissingExtra,
    TerrineError,
    UnsupportedEvent,
)

log = logging.getLogger("terrine.gateway")


class Refused(TerrineError):
    """An answer of its own status; `told` goes into its body."""

    def __init__(self, status: int, message: str, **told: Any) -> None:
        super().__init__(message)
        self.status = status
        self.told = told


class ChargedAndLost(Refused):
    """Something failed after the charge: what was charged stays charged, and why is not said."""

    def __init__(self, request: str) -> None:
        super().__init__(
            500,
            "the answer failed after it was charged; what was charged stays charged; why is withheld, because it may "
            "depend on private rows; the server's log tells the data's owner where to look",
            request=request,
            charged=True,
        )


def missing(what: str) -> Refused:
    """The same words for what is not there and for what is not the caller's."""
    return Refused(404, f"no such {what}, or it was not lent to you")


def answer_to(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error."""
    match error:
        case Refused():
            return error.status, {"error": str(error), **error.told}
        case HTTPException():
            return error.status_code, {"error": "not as it should be"}
        case BudgetExceeded():
            return 409, {"error": f"the data set's budget has not enough left: {error}", "charged": False}
        case LedgerUnavailable() if "clock" in str(error):
            log.error("ledger: %s", error)
            return 503, {
                "error": "the server's clock stands before the last charge; nothing was charged; tell its owner"
            }
        case LedgerUnavailable():
            log.error("ledger: %s", error)
            return 503, {"error": "the ledger's database cannot be used now; nothing was released; try again later"}
        case LedgerDamaged():
            log.critical("ledger: %s", error)
            return 503, {"error": "the ledger's records are damaged; nothing was released; tell the server's owner"}
        case EngineFailed() | MissingExtra():
            log.error("%s: %s", type(error).__name__, error)
            return 503, {"error": "the data's engine cannot be used now; tell the data's owner"}
        case InvalidArgument() | UnsupportedEvent():
            return 422, {"error": str(error)}
        case TerrineError():
            log.error("%s: %s", type(error).__name__, error)
            return 409, {"error": "refused; nothing was released"}
        case _:
            log.exception("unexpected", exc_info=error)
            return 500, {"error": "the server failed; whether anything was charged, GET /requests says"}
