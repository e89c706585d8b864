"""Durable budgets: every event charged against a data set, on disk before anything is shown."""

import importlib.util

from terrine.errors import MissingExtra

if importlib.util.find_spec("sqlalchemy") is None:
    raise MissingExtra("SQLAlchemy", extra="ledger")

from terrine.ledger.account import Account, Charge
from terrine.ledger.ledger import Ledger
from terrine.ledger.report import Report
from terrine.ledger.sealing import new_key
from terrine.ledger.transfer import verify_export
from terrine.ledger.verification import Finding

__all__ = ["Account", "Charge", "Finding", "Ledger", "Report", "new_key", "verify_export"]
