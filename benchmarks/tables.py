"""Tables larger than memory: rows, seconds and peak megabytes of each step, in a process of its own.

    python benchmarks/tables.py                     10 million rows of ten columns, as Parquet and as CSV
    python benchmarks/tables.py --rows 1000000 --formats parquet csv.gz sqlite duckdb --train

`schema` drafts the public facts, `read` passes over all cells, `encode` makes the features of every row (22 numbers a
row), `train` is a whole `terrine train` of one short epoch. The peak is the process's largest resident set, with the
libraries in it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS = ("schema", "read", "encode")
AT_ONCE = 500_000
SCHEMA = """version = 2
[label]
name = "ill"
classes = ["no", "yes"]
[columns.ward]
kind = "category"
values = ["A", "B", "C"]
[columns.sex]
kind = "category"
values = ["f", "m"]
[columns.seen]
kind = "date"
low = "2010-01-01"
high = "2030-01-01"
"""
NUMBERS = ("age", "weight", "height", "pulse", "pressure", "sugar")


def main() -> None:
    """Make the tables, measure the steps, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--formats", nargs="+", default=["parquet", "csv"])
    parser.add_argument("--train", action="store_true", help="Also a whole run of one short epoch.")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--table", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.step is not None:
        print(json.dumps(measured(asked.step, asked.table)))
        return
    print(f"{'format':<10}{'step':<8}{'rows':>12}{'seconds':>10}{'peak MB':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for form in asked.formats:
            path = written(Path(folder), form, asked.rows)
            for step in (*STEPS, *(("train",) if asked.train else ())):
                found = in_child(step, path)
                print(
                    f"{form:<10}{step:<8}{found['rows']:>12,}{found['seconds']:>10.1f}{found['peak']:>10.0f}",
                    flush=True,
                )


def in_child(step: str, path: str) -> dict[str, Any]:
    """One step in a process of its own."""
    command = [sys.executable, __file__, "--step", step, "--table", path]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(step: str, path: str) -> dict[str, Any]:
    """What a step takes in this process."""
    began = time.perf_counter()
    rows = steps(step, path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": rows, "seconds": time.perf_counter() - began, "peak": peak}


def steps(step: str, path: str) -> int:
    """Do it; gives how many rows there were."""
    from terrine import tables

    table = tables.open_table(path)
    schema = tables.Schema.load(tables.schema_path(path))
    if step == "schema":
        tables.draft(table, "ill")
    elif step == "read":
        return sum(batch.num_rows for batch in table.batches())
    elif step == "encode":
        from terrine.pipeline.models import Architecture

        inputs = schema.encode(table)
        Architecture("linear", (schema.width,), 2).features(inputs)
        schema.labels(table)
    else:
        from terrine import pipeline

        asked = pipeline.Settings(table=path, label="ill", epsilon=1.0, epochs=0.1, model="linear", audit=0)
        with tempfile.TemporaryDirectory() as out:
            pipeline.train(asked, Path(out) / "run")
    return int(table.num_rows)


def written(folder: Path, form: str, rows: int) -> str:
    """A made-up table of so many rows."""
    import pyarrow
    from pyarrow import csv, parquet

    bounds = "".join(f'[columns.{name}]\nkind = "number"\nlow = 0\nhigh = 200\n' for name in NUMBERS)
    where = str(folder / f"t.{form}") + ("::t" if form in ("sqlite", "duckdb") else "")
    from terrine import tables

    tables.schema_path(where).write_text(SCHEMA + bounds)
    path, opened = folder / f"t.{form}", None
    for at in range(0, rows, AT_ONCE):
        part = pyarrow.table(made(min(AT_ONCE, rows - at), at))
        if form == "parquet":
            opened = opened or parquet.ParquetWriter(path, part.schema)
            opened.write_table(part)
        elif form in ("csv", "csv.gz"):
            opened = opened or csv.CSVWriter(pyarrow.output_stream(str(path), compression="detect"), part.schema)
            opened.write_table(part)
        elif form == "sqlite":
            opened = opened or sqlite3.connect(path)
            opened.execute(f"create table if not exists t ({', '.join(part.column_names)})")
            lines = zip(*(part.column(name).cast("string").to_pylist() for name in part.column_names), strict=True)
            opened.executemany(f"insert into t values ({', '.join('?' * part.num_columns)})", lines)
            opened.commit()
        else:
            import duckdb

            opened = opened or duckdb.connect(str(path))
            opened.execute("create table if not exists t as from part limit 0")
            opened.execute("insert into t from part")
    if opened is not None:
        opened.close()
    return where


def made(rows: int, seed: int) -> dict[str, Any]:
    """Some rows."""
    generator = np.random.default_rng(seed)
    columns: dict[str, Any] = {name: generator.normal(100, 30, rows).round(1) for name in NUMBERS}
    days = generator.integers(0, 6000, rows).astype("datetime64[D]") + np.timedelta64(40 * 365, "D")
    ward, sex = generator.choice(["A", "B", "C", "D"], rows), generator.choice(["f", "m"], rows)
    ill = np.where(columns["age"] + generator.normal(0, 20, rows) > 110, "yes", "no")
    return columns | {"ward": ward, "sex": sex, "seen": days, "ill": ill}


if __name__ == "__main__":
    main()
