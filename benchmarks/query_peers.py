"""One peer's answer to the question of `queries.py`, in the peer's own virtual environment.

    python query_peers.py opendp|smartnoise|tumult visits.parquet ROUNDS

Prints one line of JSON: the median seconds, the answers as (region, count, mean), and what is to be known about them.
The budget is epsilon 1 for count and mean together, people own at most 20 rows, costs are within 0 and 10,000.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

REGIONS = [f"r{number}" for number in range(50)]
MOST, UPPER = 20, 10_000.0


def main() -> None:
    name, path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ask, note = {"opendp": opendp, "smartnoise": smartnoise, "tumult": tumult}[name](path)
    times, answers = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        answers.append(ask())
        times.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": statistics.median(times), "answers": answers, "note": note}))


def opendp(path: str) -> tuple[Any, str]:
    import opendp.prelude as dp
    import polars as pl

    dp.enable_features("contrib")
    rows = pl.read_parquet(path).lazy()
    keys = pl.LazyFrame({"region": REGIONS}, schema_overrides={"region": pl.String})

    def ask() -> list[Any]:
        context = dp.Context.compositor(
            data=rows,
            privacy_unit=dp.unit_of(contributions=1, identifier="patient_id"),
            privacy_loss=dp.loss_of(epsilon=1.0),
            split_evenly_over=1,
            margins=[dp.polars.Margin(by=["region"], max_length=10_000_000, max_groups=50)],
        )
        cost = pl.col("cost").fill_null(0.0).fill_nan(0.0)
        answer = (
            context.query()
            .truncate_per_group(MOST)
            .group_by("region")
            .agg(dp.len(), cost.dp.sum((0.0, UPPER)).alias("total"))
            .with_keys(keys)
            .release()
            .collect()
        )
        return [(row["region"], row["len"], row["total"] / max(1, row["len"])) for row in answer.to_dicts()]

    return ask, "mean is sum / count, both noisy"


def smartnoise(path: str) -> tuple[Any, str]:
    import pandas as pd
    import snsql

    rows = pd.read_parquet(path)
    columns = {
        "patient_id": {"type": "int", "private_id": True},
        "region": {"type": "string"},
        "cost": {"type": "float", "lower": 0.0, "upper": UPPER},
        "max_ids": MOST,
        "censor_dims": False,
        "sample_max_ids": True,
        "row_privacy": False,
        "rows": len(rows),
    }
    metadata = {"": {"clinic": {"visits": columns}}}
    # It charges 2 for these two columns at epsilon 1: at 0.5 the charge is 1.
    privacy = snsql.Privacy(epsilon=0.5, delta=1e-6)
    reader = snsql.from_df(rows, privacy=privacy, metadata=metadata)
    sql = "SELECT region, COUNT(*) AS n, AVG(cost) AS mean FROM clinic.visits GROUP BY region"

    def ask() -> list[Any]:
        found = reader.execute(sql)[1:]
        return [(row[0], int(row[1]), float(row[2])) for row in found]

    return ask, "epsilon 0.5 for each column"


def tumult(path: str) -> tuple[Any, str]:
    from pyspark.sql import SparkSession
    from tmlt.analytics import AddRowsWithID, KeySet, MaxRowsPerID, PureDPBudget, QueryBuilder, Session

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rows = spark.read.parquet(path)
    keys = KeySet.from_dict({"region": REGIONS})

    def ask() -> list[Any]:
        session = Session.from_dataframe(
            PureDPBudget(1.0), "visits", rows, protected_change=AddRowsWithID("patient_id")
        )
        bounded = QueryBuilder("visits").enforce(MaxRowsPerID(MOST)).groupby(keys)
        counts = session.evaluate(bounded.count(name="n"), PureDPBudget(0.5)).toPandas()
        means = session.evaluate(bounded.average("cost", 0, UPPER, name="mean"), PureDPBudget(0.5)).toPandas()
        found = counts.merge(means, on="region")
        return [(row.region, int(row.n), float(row.mean)) for row in found.itertuples()]

    return ask, "epsilon 0.5 for count, 0.5 for mean"


if __name__ == "__main__":
    main()
