"""Tables of people for the tests: ordinary ones, and one person who does everything a bound must survive."""

import datetime
import decimal
import math

import numpy as np
import pyarrow as pa

REGIONS = ["N", "S", "E", "W"]
SCHEMA = pa.schema(
    [
        ("patient_id", pa.int64()),
        ("region", pa.string()),
        ("cost", pa.float64()),
        ("price", pa.decimal128(10, 2)),
        ("visits", pa.int64()),
        ("day", pa.date32()),
        ("urgent", pa.bool_()),
        ("hospital", pa.int64()),
    ]
)


def row(person, region="N", cost=100.0, price="1.25", visits=3, day=1, urgent=True, hospital=1):
    return {
        "patient_id": person,
        "region": region,
        "cost": cost,
        "price": None if price is None else decimal.Decimal(price),
        "visits": visits,
        "day": datetime.date(2024, 1, day),
        "urgent": urgent,
        "hospital": hospital,
    }


def ordinary(people=40, seed=0):
    """A few rows for each of some people, with NULLs, NaN and infinities among them."""
    generator = np.random.default_rng(seed)
    odd = [None, math.nan, math.inf, -math.inf, -0.0, 1e300, -1e-320, 5e-324]
    rows = []
    for person in range(people):
        for _ in range(int(generator.integers(1, 7))):
            cost = float(generator.gamma(2, 1000))
            if generator.random() < 0.2:
                cost = odd[int(generator.integers(len(odd)))]
            rows.append(
                row(
                    person,
                    [*REGIONS, None, "elsewhere"][int(generator.integers(6))],
                    cost,
                    f"{generator.integers(0, 10**7)}.{generator.integers(10, 100)}"
                    if generator.random() < 0.9
                    else None,
                    int(generator.integers(-(2**40), 2**40)),
                    int(generator.integers(1, 29)),
                    bool(generator.integers(2)),
                    int(generator.integers(5)),
                )
            )
    broken = [row(person, region, odd[person]) for person in range(len(odd)) for region in REGIONS]
    return [*rows, *broken, row(None, cost=5.0), row(None, cost=7.0)]


def table(rows):
    columns = {name: [one[name] for one in rows] for name in SCHEMA.names}
    return pa.table(
        {name: pa.array(values, SCHEMA.field(name).type, from_pandas=False) for name, values in columns.items()}
    )


HOSPITALS = pa.table({"id": [0, 1, 1, 2, 3], "kind": ["a", "b", "c", "a", "b"]})  # 1 stands twice: the join multiplies
