"""Engines are found here: DuckDB always, PostgreSQL where a server can be started, Spark where there is Java."""

import shutil

import duckdb
import pytest

from terrine import ledger, queries
from terrine.events import Budget, Unit


class DuckDB:
    name = "duckdb"

    def __init__(self):
        self.connection = duckdb.connect()

    def load(self, name, table):
        self.connection.register("arriving", table)
        self.connection.execute(f'CREATE OR REPLACE TABLE "{name}" AS SELECT * FROM arriving')
        self.connection.unregister("arriving")


class PostgreSQL:
    name = "postgres"

    def __init__(self, url):
        import ibis
        import psycopg

        self.connection = ibis.connect(url.replace("+psycopg", ""))
        self.raw = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)

    def load(self, name, table):
        kinds = {"int64": "bigint", "double": "double precision", "string": "text", "date32[day]": "date"}
        kinds |= {"bool": "boolean", "decimal128(10, 2)": "numeric(10, 2)"}
        columns = ", ".join(f'"{field.name}" {kinds[str(field.type)]}' for field in table.schema)
        self.raw.execute(f'DROP TABLE IF EXISTS "{name}"')
        self.raw.execute(f'CREATE TABLE "{name}" ({columns})')
        with self.raw.cursor() as cursor, cursor.copy(f'COPY "{name}" FROM STDIN') as copy:
            for row in table.to_pylist():
                copy.write_row(tuple(row.values()))


class Spark:
    name = "pyspark"

    def __init__(self, session):
        self.connection = session

    def load(self, name, table):
        from pyspark.sql import types

        kinds = {"int64": types.LongType(), "double": types.DoubleType(), "string": types.StringType()}
        kinds |= {
            "date32[day]": types.DateType(),
            "bool": types.BooleanType(),
            "decimal128(10, 2)": types.DecimalType(10, 2),
        }
        fields = [types.StructField(field.name, kinds[str(field.type)], True) for field in table.schema]
        rows = [tuple(row.values()) for row in table.to_pylist()]
        self.connection.createDataFrame(rows, types.StructType(fields)).createOrReplaceTempView(name)


@pytest.fixture(scope="session")
def spark():
    if shutil.which("java") is None:
        pytest.skip("no Java on the PATH")
    sql = pytest.importorskip("pyspark.sql")
    builder = sql.SparkSession.builder.master("local[2]").appName("terrine tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.adaptive.enabled": "false",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def engines(request):
    """An engine by its name, made once."""
    made = {}

    def engine(name):
        if name not in made:
            if name == "duckdb":
                made[name] = DuckDB()
            elif name == "postgres":
                made[name] = PostgreSQL(request.getfixturevalue("new_schema")())
            else:
                made[name] = Spark(request.getfixturevalue("spark"))
        return made[name]

    return engine


@pytest.fixture
def duck():
    return DuckDB()


@pytest.fixture
def account(tmp_path):
    with ledger.Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as book:
        yield book.account("patients", budget=Budget(epsilon=10, delta=1e-6), unit=Unit.PERSON)


@pytest.fixture
def visits():
    return {"visits": queries.Private(person="patient_id", rows=3, groups=2)}
