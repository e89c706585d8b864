"""One interface for every audit, a function of the data and a pair of neighbours: queries and PATE by `lower_bound`.

Confidence is 99% and seeds are fixed: a right mechanism fails one of these tests with a chance below 1%, once and for
all. Beside each stands a mutant that must be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from terrine import accounting, audit, pate, queries
from terrine.events import Budget
from terrine.rng import Seeded

duckdb = pytest.importorskip("duckdb")
PEOPLE = [0] * 10 + list(range(1, 20))
"""Whose the rows of a table are: person 0 came ten times."""
NEIGHBOURS = list(range(1, 20))
SQL = "SELECT copy, COUNT(*) AS n FROM visits GROUP BY copy"


def counting(epsilon: float, *, person: str) -> Callable[[list[int], int], Any]:
    """How many rows a session counts. One question answers all runs: every run has a copy of the people to itself."""
    sources = iter(range(10**6))

    def mechanism(whose: list[int], runs: int) -> list[float]:
        copies, rows = np.repeat(np.arange(runs), len(whose)), np.arange(runs * len(whose))
        columns = {"copy": copies, "who": copies * 100 + np.tile(whose, runs), "visit": rows}
        connection = duckdb.connect()
        connection.execute("CREATE TABLE visits (copy BIGINT, who BIGINT, visit BIGINT)")
        connection.execute(
            "INSERT INTO visits SELECT unnest($copy), unnest($who), unnest($visit)",
            {name: values.tolist() for name, values in columns.items()},
        )
        declared = {"visits": queries.Private(person=person, rows=1)}
        session = queries.Session(connection, None, tables=declared, rng=Seeded(next(sources)))
        found = session.sql(SQL, epsilon=epsilon, keys={"copy": list(range(runs))}).table.to_pydict()
        return [float(one) for one in found["n"]]

    return mechanism


def test_a_sessions_answer_keeps_its_epsilon() -> None:
    found = audit.lower_bound(counting(1.0, person="who"), PEOPLE, NEIGHBOURS, trials=4000, confidence=0.99)
    assert 0.4 < found.epsilon <= 1.0
    assert not audit.verdict(Budget(1.0, 0.0), found).violated


def test_the_mutant_that_takes_every_visit_for_a_person_is_caught() -> None:
    found = audit.lower_bound(counting(1.0, person="visit"), PEOPLE, NEIGHBOURS, trials=4000, confidence=0.99)
    assert audit.verdict(Budget(1.0, 0.0), found).violated


def labelling(noise: float) -> Callable[[list[int], int], Any]:
    """One label by a noisy plurality of teachers, told by each teacher's vote."""
    sources = iter(range(10**6))

    def mechanism(told: list[int], runs: int) -> list[int]:
        deal = pate.split(1000, len(told), seed=0)
        votes = pate.count(np.tile(np.array(told)[:, None], (1, runs)), classes=2, deal=deal)
        return pate.GaussianMax(noise).answer(votes, rng=Seeded(next(sources))).labels.tolist()

    return mechanism


VOTES = [0] * 10 + [1] * 10
"""One teacher who saw another row votes otherwise: where the others are split, that vote decides."""
NEIGHBOUR = [0] * 11 + [1] * 9
DELTA = 1e-5


def test_a_pate_label_keeps_its_event() -> None:
    claim = Budget(accounting.epsilon(pate.GaussianMax(2.0).event(1), delta=DELTA), DELTA)
    found = audit.lower_bound(labelling(2.0), VOTES, NEIGHBOUR, trials=20_000, delta=DELTA, confidence=0.99)
    assert found.epsilon > 0.1
    assert not audit.verdict(claim, found).violated


def test_the_mutant_that_forgets_the_noise_of_the_votes_is_caught() -> None:
    claim = Budget(accounting.epsilon(pate.GaussianMax(2.0).event(1), delta=DELTA), DELTA)
    found = audit.lower_bound(labelling(0.1), VOTES, NEIGHBOUR, trials=20_000, delta=DELTA, confidence=0.99)
    assert audit.verdict(claim, found).violated
