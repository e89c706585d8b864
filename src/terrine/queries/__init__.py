"""Questions about people's tables, answered with noise, error bars and a charge in the same ledger as trainings.

    session = queries.Session(connection, account, tables={"visits": queries.Private(person="patient_id", rows=20)})
    answer = session.sql("SELECT region, COUNT(*) AS n FROM visits GROUP BY region",
                         epsilon=0.5, keys={"region": ["N", "S"]})
    answer.table, answer.event

The unit is the person, neighbours add or remove all rows of one. `bounding` holds the proofs, `planning` the price.
"""

import importlib.util

from terrine.errors import MissingExtra

if importlib.util.find_spec("ibis") is None:
    raise MissingExtra("ibis-framework", extra="queries")
if importlib.util.find_spec("sqlglot") is None:
    raise MissingExtra("sqlglot", extra="queries")
if importlib.util.find_spec("pyarrow") is None:
    raise MissingExtra("pyarrow", extra="queries")

from terrine.queries.answers import Answer, Explanation
from terrine.queries.declared import Private, Public
from terrine.queries.session import Session

__all__ = ["Answer", "Explanation", "Private", "Public", "Session"]
