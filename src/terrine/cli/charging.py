"""The account that `--ledger` and `--account` name together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from terrine.errors import InvalidArgument

if TYPE_CHECKING:
    from terrine.ledger import Account


@contextlib.contextmanager
def charged_account(url: str | None, name: str | None) -> Iterator[Account | None]:
    """The account while its ledger is open, None without both; $TERRINE_LEDGER_KEY is its key for sealed fields.

    Raises:
        InvalidArgument: one is given without the other.
        LedgerUnavailable: the ledger is not there.
    """
    if url is None and name is None:
        yield None
        return
    if url is None or name is None:
        raise InvalidArgument("--ledger and --account: want both, or neither")
    from terrine.ledger import Ledger

    with Ledger.open(url, key=os.environ.get("TERRINE_LEDGER_KEY"), create=False) as book:
        yield book.account(name)
