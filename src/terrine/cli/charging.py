"""The account that `--ledger` and `--account` name together, and for whom and what it is charged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine.errors import InvalidArgument

if TYPE_CHECKING:
    from terrine.ledger import Account

LedgerUrl = Annotated[str | None, typer.Option("--ledger", help="Charge this ledger (a database URL) first.")]
AccountName = Annotated[str | None, typer.Option("--account", help="The account in the ledger.")]
By = Annotated[str | None, typer.Option("--by", help="Who is charged, as the ledger keeps it.")]
Purpose = Annotated[str | None, typer.Option("--purpose", help="What for, as the ledger keeps it.")]
Weak = Annotated[
    bool,
    typer.Option("--weak-guarantee", help="Go on with epsilon above 20, or with delta not below 1/n."),
]
NOWHERE = "counted nowhere: --ledger and --account would charge"
"""What is said, with what it is about, where neither was given."""


@dataclass(frozen=True)
class Charging:
    """An open ledger's account, or none; who is charged, and what for."""

    account: Account | None
    purpose: str
    by: str

    @property
    def told(self) -> dict[str, Any]:
        """Account, purpose and by, as functions that charge take them."""
        return {"account": self.account, "purpose": self.purpose, "by": self.by}

    def head(self, *, quiet: bool) -> Callable[[], str] | None:
        """What asks the account for its head after the charge, and says it unless `quiet`."""
        if (account := self.account) is None:
            return None

        def asked() -> str:
            found = account.head()
            if not quiet:
                typer.echo(f"charged to {account.name}; its head, to be written down elsewhere: {found}")
            return found

        return asked


@contextlib.contextmanager
def charging(
    url: str | None, name: str | None, *, by: str | None, purpose: str | None, usual: str
) -> Iterator[Charging]:
    """The account while its ledger is open, none without both; $TERRINE_LEDGER_KEY is its key for sealed fields.

    `usual` is the purpose where none is given.

    Raises:
        InvalidArgument: one is given without the other.
        LedgerUnavailable: the ledger is not there.
    """
    if url is None and name is None:
        if by is not None or purpose is not None:
            raise InvalidArgument(
                "--by and --purpose say who is charged, and what for: want --ledger and --account too"
            )
        yield Charging(None, usual, "terrine")
        return
    if url is None or name is None:
        raise InvalidArgument("--ledger and --account: want both, or neither")
    from terrine.ledger import Ledger

    with Ledger.open(url, key=os.environ.get("TERRINE_LEDGER_KEY"), create=False) as book:
        yield Charging(book.account(name), purpose or usual, by or "terrine")
