"""Questions about people's tables, answered with noise, error bars and a charge in the same ledger as trainings.

    session = queries.Session(connection, account, tables={"visits": queries.Private(person="patient_id", rows=20)})
    answer = session.sql("SELECT region, COUNT(*) AS n FROM visits GROUP BY region",
                         epsilon=0.5, keys={"region": ["N", "S"]})
    answer.table, answer.event

The unit is the person, neighbours add or remove all rows of one. `bounding` holds the proofs, `planning` the price.
"""

import importlib.util

from terrine.errors import MissingExtra

for _package, _module in (("ibis-framework[duckdb]", "ibis"), ("sqlglot", "sqlglot"), ("pyarrow", "pyarrow")):
    if importlib.util.find_spec(_module) is None:
        raise MissingExtra(_package, extra="queries")

from terrine.queries.answers import Answer, Explanation
from terrine.queries.declared import Private, Public
from terrine.queries.session import Session

__all__ = ["Answer", "Explanation", "Private", "Public", "Session"]
