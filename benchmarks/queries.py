"""What do private answers cost? Terrine against the plain question, OpenDP, SmartNoise and Tumult Analytics.

    python benchmarks/queries.py [--rows 10000000] [--peer-rows 1000000] [--rounds 3] [--json queries.json]

The question: COUNT(*) and AVG(cost) in 50 regions. Rows are random visits of a tenth as many people, DuckDB in memory
on two threads. "Plain" is the same question without privacy. Peak memory is that of a process that runs the private
question alone. Peers run on `--peer-rows` rows, each in its own virtual environment, named by $OPENDP_PYTHON,
$SMARTNOISE_PYTHON and $TUMULT_PYTHON: an interpreter that has opendp[polars], smartnoise-sql or tmlt.analytics. Where
is missing, that peer is left out with a message. Errors are root mean squares over the regions, each at its own
declared budget of epsilon 1 for count and mean together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from terrine import queries

REGIONS = [f"r{number}" for number in range(50)]
SQL = "SELECT region, COUNT(*) AS n, AVG(cost) AS mean FROM visits GROUP BY region"
ASKED: dict[str, Any] = {"epsilon": 1.0, "bounds": {"cost": (0, 10_000)}, "keys": {"region": REGIONS}}
MOST = 20
_PEERS = {"opendp": "OPENDP_PYTHON", "smartnoise": "SMARTNOISE_PYTHON", "tumult": "TUMULT_PYTHON"}
_console = Console(stderr=True, highlight=False)


def main() -> None:
    arguments = parse()
    if arguments.alone:
        print(json.dumps(alone(arguments.rows)))
        return
    result: dict[str, Any] = {"rows": arguments.rows, "terrine": compare(arguments.rows, arguments.rounds)}
    done = [sys.executable, __file__, "--alone", "--rows", str(arguments.rows)]
    result["memory"] = json.loads(subprocess.run(done, capture_output=True, text=True, check=True).stdout)
    result["peers"] = peers(arguments.peer_rows, arguments.rounds)
    show(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--peer-rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="Print the peak memory of one private question.")
    parser.add_argument("--json", metavar="PATH")
    return parser.parse_args()


def visits(rows: int) -> pa.Table:
    """Random visits: a tenth as many people as rows, 50 regions, costs with a long tail."""
    generator = np.random.default_rng(0)
    regions = pa.DictionaryArray.from_arrays(generator.integers(0, 50, rows, dtype=np.int32), REGIONS)
    people = generator.integers(0, max(1, rows // 10), rows)
    return pa.table({"patient_id": people, "region": regions, "cost": generator.gamma(2, 1000, rows)})


def connected(rows: int) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    made = visits(rows)  # noqa: F841, DuckDB finds it by its name
    connection.execute("CREATE TABLE visits AS SELECT patient_id, region::VARCHAR AS region, cost FROM made")
    return connection


def session_on(connection: duckdb.DuckDBPyConnection) -> queries.Session:
    return queries.Session(
        connection, None, {"visits": queries.Private(person="patient_id", rows=MOST, complete=("cost",))}
    )


def compare(rows: int, rounds: int) -> dict[str, float]:
    """Seconds of the private and the plain question in turn, the median ratio, and the time of `explain`."""
    connection = connected(rows)
    session = session_on(connection)
    plain_sql = "SELECT region, COUNT(*), AVG(cost) FROM visits GROUP BY region"
    session.sql(SQL, **ASKED)
    times, explains = [], []
    for _ in range(rounds):
        private = seconds(lambda: session.sql(SQL, **ASKED))
        plain = seconds(lambda: connection.execute(plain_sql).fetchall())
        times.append((private, plain))
        explains.append(seconds(lambda: session.explain(SQL, **ASKED)))
    return {
        "private_seconds": statistics.median(mine for mine, _ in times),
        "plain_seconds": statistics.median(plain for _, plain in times),
        "ratio": statistics.median(mine / plain for mine, plain in times),
        "explain_milliseconds": 1000 * statistics.median(explains),
    }


def alone(rows: int) -> dict[str, float]:
    """Peak memory of the process, before and after the private question."""
    connection = connected(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    session_on(connection).sql(SQL, **ASKED)
    return {"table_gigabytes": before, "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def peers(rows: int, rounds: int) -> dict[str, Any]:
    """Seconds and errors of every peer that is there, beside Terrine's own, on the same rows."""
    connection = connected(rows)
    truth = {row[0]: row[1:] for row in connection.execute(SQL).fetchall()}
    session = session_on(connection)
    session.sql(SQL, **ASKED)
    times = [seconds(lambda: session.sql(SQL, **ASKED)) for _ in range(rounds)]
    answers = [session.sql(SQL, **ASKED).table.to_pylist() for _ in range(rounds)]
    rows_found = [[(row["region"], row["n"], row["mean"]) for row in one] for one in answers]
    result: dict[str, Any] = {"terrine": {"seconds": statistics.median(times), **errors(rows_found, truth)}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "visits.parquet"
        pq.write_table(connection.execute("SELECT * FROM visits").to_arrow_table(), path)
        for name, variable in _PEERS.items():
            if not os.environ.get(variable):
                _console.print(f"{name}: left out; set ${variable} to an interpreter that has it")
                continue
            script = Path(__file__).with_name("query_peers.py")
            command = [os.environ[variable], str(script), name, str(path), str(rounds)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                _console.print(f"{name}: failed: {done.stderr.strip().splitlines()[-1:]}")
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            result[name] = {"seconds": found["seconds"], **errors(found["answers"], truth), "note": found["note"]}
    return result


def errors(answers: list[list[Any]], truth: dict[str, Any]) -> dict[str, float]:
    """Root mean square errors of count and mean over regions and repetitions."""
    counts = [row[1] - truth[row[0]][0] for one in answers for row in one]
    means = [row[2] - truth[row[0]][1] for one in answers for row in one if row[2] is not None]
    return {
        "count_error": float(np.sqrt(np.mean(np.square(counts)))),
        "mean_error": float(np.sqrt(np.mean(np.square(means)))),
    }


def seconds(run: Any) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def show(result: dict[str, Any]) -> None:
    own, memory = result["terrine"], result["memory"]
    print(
        f"{result['rows']:,} rows: private {own['private_seconds']:.2f} s, plain {own['plain_seconds']:.3f} s, "
        f"ratio {own['ratio']:.1f} (at most 20); explain {own['explain_milliseconds']:.1f} ms (below 50); "
        f"peak memory {memory['peak_gigabytes']:.2f} GB, of which the table {memory['table_gigabytes']:.2f} (below 2)"
    )
    table = Table("", "seconds", "times Terrine's", "count error", "mean error", "note")
    fastest = result["peers"]["terrine"]["seconds"]
    for name, one in result["peers"].items():
        cells = [f"{one['seconds']:.2f}", f"{one['seconds'] / fastest:.1f}", f"{one['count_error']:.1f}"]
        table.add_row(name, *cells, f"{one['mean_error']:.2f}", one.get("note", ""))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
