"""The ledger's tables, and how a file of an older version becomes one of this version.

Version 1 is a migration like any other: from nothing. A migration is never edited once released;
a change is the next one. Plain SQL that SQLite and PostgreSQL both read: text and whole numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, Connection, MetaData, Table, Text, inspect, text

from terrine.errors import LedgerDamaged, LedgerUnavailable


@dataclass(frozen=True)
class Migration:
    """The statements that lead from version - 1 to `version`."""

    version: int
    statements: tuple[str, ...]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        1,
        (
            "CREATE TABLE ledger_meta (one BIGINT PRIMARY KEY, version BIGINT NOT NULL, accounts BIGINT NOT NULL)",
            "INSERT INTO ledger_meta (one, version, accounts) VALUES (1, 0, 0)",
            "CREATE TABLE ledger_accounts (account TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, opened BIGINT NOT NULL,"
            " terms TEXT NOT NULL, unit TEXT NOT NULL, neighbours TEXT NOT NULL, partitions TEXT NOT NULL,"
            " hash TEXT NOT NULL)",
            "CREATE TABLE ledger_heads (account TEXT PRIMARY KEY REFERENCES ledger_accounts (account),"
            " sequence BIGINT NOT NULL, hash TEXT NOT NULL)",
            "CREATE TABLE ledger_charges (account TEXT NOT NULL REFERENCES ledger_accounts (account),"
            " sequence BIGINT NOT NULL, at BIGINT NOT NULL, event TEXT NOT NULL, purpose TEXT NOT NULL,"
            ' "by" TEXT NOT NULL, "partition" TEXT NOT NULL, cost TEXT NOT NULL, state TEXT NOT NULL,'
            " sealed TEXT NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL, PRIMARY KEY (account, sequence))",
            # A charge on the whole account is not in the index: the last row of an account carries that sum.
            'CREATE INDEX ledger_streams ON ledger_charges (account, "partition", sequence) WHERE "partition" <> \'\'',
        ),
    ),
)

VERSION = MIGRATIONS[-1].version

_METADATA = MetaData()
META = Table(
    "ledger_meta",
    _METADATA,
    Column("one", BigInteger, primary_key=True),
    Column("version", BigInteger),
    Column("accounts", BigInteger),
)
ACCOUNTS = Table(
    "ledger_accounts",
    _METADATA,
    Column("account", Text, primary_key=True),
    Column("name", Text),
    Column("opened", BigInteger),
    *(Column(name, Text) for name in ("terms", "unit", "neighbours", "partitions", "hash")),
)
HEADS = Table(
    "ledger_heads",
    _METADATA,
    Column("account", Text, primary_key=True),
    Column("sequence", BigInteger),
    Column("hash", Text),
)
CHARGES = Table(
    "ledger_charges",
    _METADATA,
    Column("account", Text, primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("at", BigInteger),
    *(
        Column(name, Text, quote=True)
        for name in ("event", "purpose", "by", "partition", "cost", "state", "sealed", "previous")
    ),
    Column("hash", Text),
)


def found_version(connection: Connection) -> int:
    """The version of the tables in the database; 0 where there are none.

    Raises:
        LedgerDamaged: some of the tables are missing.
        LedgerUnavailable: they are from a newer Terrine.
    """
    present = set(inspect(connection).get_table_names())
    if META.name not in present:
        if present & {ACCOUNTS.name, CHARGES.name, HEADS.name}:
            raise LedgerDamaged(f"the ledger has no table {META.name}; restore it from a backup or an export")
        return 0
    version = connection.execute(text("SELECT version FROM ledger_meta WHERE one = 1")).scalar()
    if not isinstance(version, int):
        raise LedgerDamaged("the ledger does not say its version; restore it from a backup or an export")
    if version > VERSION:
        raise LedgerUnavailable(f"the ledger is of version {version}: this Terrine reads up to {VERSION}; upgrade it")
    if missing := sorted({ACCOUNTS.name, CHARGES.name, HEADS.name} - present):
        raise LedgerDamaged(f"the ledger has no table {missing[0]}; restore it from a backup or an export")
    return version


def migrate(connection: Connection, migrations: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Bring the tables up to the last of `migrations`, inside the caller's transaction."""
    version = found_version(connection)
    for migration in migrations:
        if migration.version <= version:
            continue
        for statement in migration.statements:
            connection.execute(text(statement))
        connection.execute(text("UPDATE ledger_meta SET version = :version"), {"version": migration.version})
