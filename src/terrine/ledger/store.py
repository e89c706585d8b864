"""Where the rows live: one transaction at a time, durable when it returns, every database error in one clear line.

SQLite: write-ahead log with synchronous=FULL, so that a commit is on disk before it returns, and BEGIN IMMEDIATE, so
that what was read cannot change before it is written. PostgreSQL: the account's head row is locked for the transaction,
and synchronous_commit is on. Both run the same statements.

A charge must not cost much more than the commit it ends in, so connections stay open between transactions, begin and
commit are said to the driver, and the statements of a charge are compiled once and run by the driver too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BindParameter,
    Connection,
    Engine,
    Result,
    bindparam,
    create_engine,
    event,
    exc,
    func,
    insert,
    literal_column,
    make_url,
    select,
    update,
)
from sqlalchemy.pool import NullPool

from terrine import check
from terrine.errors import InvalidArgument, LedgerDamaged, LedgerUnavailable, MissingExtra
from terrine.ledger import schema
from terrine.ledger.file import NOTHING, PAGE, DatabaseFile, Files
from terrine.ledger.records import AccountRow, ChargeRow, mistyped

KINDS = ("sqlite", "postgresql")
"""The databases that can hold a ledger."""

_MIGRATION_LOCK = 0x7465_7272_696E_65  # "terrine"
_BEGIN = {
    ("sqlite", True): "BEGIN IMMEDIATE",
    ("sqlite", False): "BEGIN",
    ("postgresql", True): "BEGIN",
    ("postgresql", False): "BEGIN ISOLATION LEVEL REPEATABLE READ",  # all that is read is of one moment, as in SQLite
}
_INHERITED: list[OpenConnection] = []  # connections of a parent process: neither used nor closed here, so kept for ever

_KEY: BindParameter[str] = bindparam("key")


def _row(number: Any) -> Any:
    """The statement for one charge, by a number or by a query for it."""
    wanted = number if isinstance(number, BindParameter) else number.scalar_subquery()
    return select(schema.CHARGES).where(schema.CHARGES.c.account == _KEY, schema.CHARGES.c.sequence == wanted)


_HEAD = select(schema.HEADS.c.sequence, schema.HEADS.c.hash).where(schema.HEADS.c.account == _KEY)
_OTHER = schema.CHARGES.alias("other")
_LAST = select(func.max(_OTHER.c.sequence)).where(
    _OTHER.c.account == _KEY,
    _OTHER.c.partition == bindparam("stream"),
    _OTHER.c.partition != literal_column("''"),  # as the index has it
)
_MOVE_HEAD = (
    update(schema.HEADS)
    .where(schema.HEADS.c.account == _KEY)
    .values(sequence=bindparam("number"), hash=bindparam("digest"))
)
_STATEMENTS: dict[str, tuple[Any, list[str]]] = {  # what every charge runs, with the order of its values
    "head": (_HEAD, ["key"]),
    "row": (_row(bindparam("number")), ["key", "number"]),
    "last of stream": (_row(_LAST), ["key", "key", "stream"]),
    "locked head": (_HEAD.with_for_update(), ["key"]),
    "append": (insert(schema.CHARGES), list(ChargeRow._fields)),
    "move head": (_MOVE_HEAD, ["number", "digest", "key"]),
}


@dataclass(slots=True)
class OpenConnection:
    """One open connection: SQLAlchemy's, and a cursor of the driver's for the statements that every charge runs."""

    connection: Connection
    cursor: Any
    files: Files | None = None
    pipeline: Any = None
    began: bool = False

    def execute(self, *arguments: Any, **options: Any) -> Result[Any]:
        """Run a statement of SQLAlchemy's."""
        self.began = True
        return self.connection.execute(*arguments, **options)

    def begin(self, statement: str, pipelined: bool) -> None:
        """Begin a transaction; pipelined, a statement is sent without waiting for the answer to the one before."""
        if pipelined:
            self.pipeline = self.cursor.connection.pipeline()
            self.pipeline.__enter__()
        self.cursor.execute(statement)

    def end(self, statement: str) -> None:
        """Commit or roll back, and wait until that is done."""
        self.cursor.execute(statement)
        if self.pipeline is not None:
            pipeline, self.pipeline = self.pipeline, None
            pipeline.__exit__(None, None, None)
        if self.began:  # SQLAlchemy believes in a transaction of its own
            self.connection.rollback()
            self.began = False


class Transaction:
    """One transaction as a block: committed and on disk when the block ends, undone when it raises."""

    __slots__ = ("_begin", "_pipelined", "_session", "_store")

    def __init__(self, store: Store, begin: str, pipelined: bool) -> None:
        self._store, self._begin, self._pipelined = store, begin, pipelined
        self._session: OpenConnection | None = None

    def __enter__(self) -> OpenConnection:
        store = self._store
        try:
            self._session = session = store.take()
            session.begin(self._begin, self._pipelined)
        except store.errors as error:
            raise store.failed(self._session, error) from error
        return session

    def __exit__(self, _kind: object, raised: BaseException | None, _trace: object) -> None:
        store, session = self._store, self._session
        assert session is not None
        try:
            if raised is None or isinstance(raised, Exception):
                store.must_be_in_place(session)
            if isinstance(raised, store.errors):
                raise raised
            session.end("COMMIT" if raised is None else "ROLLBACK")
        except LedgerUnavailable:
            store.discard(session)
            raise
        except store.errors as error:
            raise store.failed(session, error) from error
        store.give_back(session)


class Store:
    """One database that holds a ledger.

    Raises:
        LedgerUnavailable: it cannot be opened now.
        LedgerDamaged: what is there is not a ledger.
    """

    def __init__(self, url: str | os.PathLike[str], *, create: bool, timeout: float) -> None:
        self.url = _url(url)
        self._timeout = timeout
        sqlite = self.url.get_backend_name() == "sqlite"
        self._file = DatabaseFile(Path(str(self.url.database))) if sqlite else None
        self._engine = self._connect_to(self.url)
        self.dialect = self._engine.dialect.name
        """The kind of database: sqlite or postgresql."""
        dbapi: Any = self._engine.dialect.dbapi
        self.errors = (exc.DBAPIError, dbapi.Error)
        self._begin, self._pipelined = _BEGIN[self.dialect, True], self.dialect == "postgresql"
        self._process = os.getpid()
        self._idle: list[OpenConnection] = []
        self._sql = {name: self._compiled(*wanted) for name, wanted in _STATEMENTS.items()}
        if self._file is not None:
            self._file.find_or_create(create, self._build)
        with self.transaction(write=False) as session:
            version = schema.found_version(session.connection)
        if self._file is not None:
            self._file.must_be_whole()
        if version == 0 and not create:
            raise LedgerUnavailable(f"{self}: holds no ledger; `terrine ledger create` makes one")
        if version < schema.VERSION:
            with self.transaction() as session:
                if self.dialect == "postgresql":
                    session.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                schema.migrate(session.connection)

    def __str__(self) -> str:
        return self._file.given.name if self._file is not None else self.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Let go of every connection."""
        while self._idle:
            self._idle.pop().connection.close()

    def transaction(self, *, write: bool = True) -> Transaction:
        """One transaction: committed and on disk when the block ends, undone when it raises."""
        return Transaction(self, _BEGIN[self.dialect, write], pipelined=False)

    def charging(self) -> Transaction:
        """A transaction to write in, for the statements that every charge runs and for no others."""
        return Transaction(self, self._begin, self._pipelined)

    def take(self) -> OpenConnection:
        """A connection that nobody else uses: one that is idle, or a new one."""
        if os.getpid() != self._process:  # a fork must neither use its parent's connections nor close them
            _INHERITED.extend(self._idle)
            self._idle, self._process = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            if self._file is not None:
                self._file.found()
            connection = self._engine.connect()
            driver: Any = connection.connection.driver_connection
            return OpenConnection(connection, driver.cursor(), None if self._file is None else self._file.found())

    def give_back(self, session: OpenConnection) -> None:
        """Keep an open connection for the next transaction."""
        self._idle.append(session)

    def must_be_in_place(self, session: OpenConnection) -> None:
        """Refuse to go on with files that were moved away or replaced since they were opened, or that hold code."""
        if self._file is not None:
            self._file.must_be(session.files)
            _refuse_code(session.cursor.execute(_STRANGE).fetchone())

    def discard(self, session: OpenConnection | None) -> None:
        """Let go of `session` and every other connection: what failed once is not trusted again."""
        self.close()
        if session is not None:
            session.connection.invalidate()  # closed, it undoes what it had begun

    def failed(self, session: OpenConnection | None, error: Exception) -> Exception:
        """`error` in one clear line, with `session` discarded."""
        self.discard(session)
        return self._explained(error)

    def lock_head(self, session: OpenConnection, account: str) -> tuple[int, str]:
        """The last sequence number and hash of `account`, which nobody else can move before this transaction ends."""
        found = session.cursor.execute(self._sql["locked head"], (account,)).fetchone()
        if found is None or type(found[0]) is not int or type(found[1]) is not str:
            raise LedgerDamaged(f"{self}: the account has no head row; run `terrine ledger verify`")
        return found[0], found[1]

    def head(self, session: OpenConnection, account: str) -> tuple[int, str] | None:
        """The last sequence number and hash of `account`, or None where the row is gone."""
        found = session.cursor.execute(self._sql["head"], (account,)).fetchone()
        return None if found is None or type(found[0]) is not int or type(found[1]) is not str else tuple(found)

    def row(self, session: OpenConnection, account: str, sequence: int) -> ChargeRow | None:
        """One charge."""
        found = session.cursor.execute(self._sql["row"], (account, sequence)).fetchone()
        return None if found is None else self._read(found)

    def last_of_streams(self, session: OpenConnection, account: str, streams: Iterable[str]) -> list[ChargeRow]:
        """The last charge on each of these partitions: one look into an index for each, however long the history."""
        sql = self._sql["last of stream"]
        found = [session.cursor.execute(sql, (account, account, stream)).fetchone() for stream in streams]
        return [self._read(row) for row in found if row is not None]

    def append(self, session: OpenConnection, row: ChargeRow) -> None:
        """Add `row` at the end of its account."""
        session.cursor.execute(self._sql["append"], row)
        session.cursor.execute(self._sql["move head"], (row.sequence, row.hash, row.account))

    def rows(self, session: OpenConnection, account: str) -> Iterator[ChargeRow]:
        """Every charge of `account`, in order, without holding them all; of whatever types the database holds."""
        table = schema.CHARGES
        wanted = select(table).where(table.c.account == account).order_by(table.c.sequence)
        for row in session.execute(wanted, execution_options={"yield_per": 1000}):
            yield ChargeRow._make(row)

    def accounts(self, session: OpenConnection, name: str | None = None) -> list[AccountRow]:
        """The declared accounts, in the order of their names."""
        wanted = select(schema.ACCOUNTS).order_by(schema.ACCOUNTS.c.name)
        if name is not None:
            wanted = wanted.where(schema.ACCOUNTS.c.name == name)
        return [AccountRow._make(row) for row in session.execute(wanted)]

    def declare(self, session: OpenConnection, row: AccountRow) -> None:
        """Add an account with no charge."""
        session.execute(insert(schema.ACCOUNTS), row._asdict())
        session.execute(insert(schema.HEADS), {"account": row.account, "sequence": 0, "hash": row.hash})
        session.execute(update(schema.META).values(accounts=schema.META.c.accounts + 1))

    def counted(self, session: OpenConnection) -> object:
        """How many accounts the ledger says it has; anything else if it does not say."""
        found = session.execute(select(schema.META.c.accounts)).scalars().all()
        return found[0] if len(found) == 1 else found

    def _read(self, found: Any) -> ChargeRow:
        row = ChargeRow._make(found)
        if name := mistyped(row):
            raise LedgerDamaged(f"{self}: a charge whose {name} is not of its type; run `terrine ledger verify`")
        return row

    def _build(self, draft: Path) -> None:
        engine = self._connect_to(self.url.set(database=str(draft)))
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA page_size = {PAGE}")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                schema.migrate(connection)
                connection.exec_driver_sql("COMMIT")
        except self.errors as error:
            raise self._explained(error) from error
        finally:
            engine.dispose()

    def _connect_to(self, url: URL) -> Engine:
        sqlite = url.get_backend_name() == "sqlite"
        arguments: dict[str, Any] = (
            {"timeout": self._timeout, "check_same_thread": False}
            if sqlite
            else {"connect_timeout": int(self._timeout) or 1}
        )
        style: Any = "qmark" if sqlite else "format"
        try:
            # Transactions are begun and committed above, not by SQLAlchemy: to it, every statement stands alone.
            engine = create_engine(
                url, poolclass=NullPool, isolation_level="AUTOCOMMIT", paramstyle=style, connect_args=arguments
            )
        except (ImportError, exc.NoSuchModuleError):
            raise MissingExtra(url.get_driver_name(), extra="postgres") from None
        if sqlite:
            event.listen(engine, "do_connect", functools.partial(_only_existing, Path(str(url.database)).absolute()))
        event.listen(engine, "connect", _prepare_sqlite if sqlite else self._prepare_postgresql)
        return engine

    def _compiled(self, statement: Any, names: list[str]) -> str:
        compiled = statement.compile(dialect=self._engine.dialect)
        assert compiled.positiontup == names, compiled.positiontup
        return str(compiled)

    def _prepare_postgresql(self, connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET synchronous_commit = on")
            cursor.execute(f"SET lock_timeout = {int(self._timeout * 1000)}")
            cursor.execute(
                "SELECT tgname FROM pg_trigger JOIN pg_class ON tgrelid = pg_class.oid "
                "WHERE NOT tgisinternal AND relname LIKE 'ledger_%'"
            )
            _refuse_code(cursor.fetchone())
        connection.commit()

    def _explained(self, error: Exception) -> Exception:
        said = " ".join(str(error.orig if isinstance(error, exc.DBAPIError) else error).split())
        for sign, (kind, reason) in _REASONS.items():
            if sign in said.lower():
                return kind(f"{self}: {reason} ({said}); {NOTHING}")
        return LedgerUnavailable(f"{self}: {said}; {NOTHING}")


_REASONS: dict[str, tuple[type[Exception], str]] = {
    "locked": (LedgerUnavailable, "another process holds it; try again when it is done"),
    "lock timeout": (LedgerUnavailable, "another process holds the account; try again when it is done"),
    "readonly": (LedgerUnavailable, "it may not be written here; make the file and its folder writable"),
    "read-only": (LedgerUnavailable, "it may not be written here; make it writable"),
    "full": (LedgerUnavailable, "there is no room to write; free some space"),
    "no space": (LedgerUnavailable, "there is no room to write; free some space"),
    "disk i/o": (LedgerUnavailable, "the disk refused; it may be full or failing"),
    "unable to open": (LedgerUnavailable, "it cannot be opened; check that the folder exists and may be written"),
    "malformed": (LedgerDamaged, "the file is damaged or cut short; restore it from a backup or an export"),
    "not a database": (LedgerDamaged, "the file is not a ledger, or was overwritten; restore it from a backup"),
}


def _url(given: str | os.PathLike[str]) -> URL:
    text = os.fspath(given)
    if "://" not in text:
        text = f"sqlite:///{text}"
    try:
        url = make_url(text)
    except exc.ArgumentError:
        raise InvalidArgument(
            "url: not a database URL; want a path, sqlite:///file or postgresql+psycopg://..."
        ) from None
    if url.get_backend_name() not in KINDS:
        raise InvalidArgument(f"url={url.drivername}: want a path, sqlite:///file or postgresql+psycopg://...")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidArgument("url: a ledger in memory would forget what was spent; want a file")
    if url.get_backend_name() == "sqlite" and (url.query or str(url.database).startswith("file:")):
        raise InvalidArgument("url: options of SQLite could lead round its locks or into memory; want a plain file")
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _only_existing(path: Path, _dialect: Any, _record: Any, given: list[Any], options: dict[str, Any]) -> None:
    """Connect to a file that is there; SQLite would otherwise begin an empty one in the place of one that is gone."""
    given[:], options["uri"] = [f"{path.as_uri()}?mode=rw"], True


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {2**22 // PAGE}")  # as usual, 4 MB
    connection.execute("PRAGMA foreign_keys = ON")
    _refuse_code(connection.execute(_STRANGE).fetchone())


_STRANGE = "SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index')"


def _refuse_code(found: Any) -> None:
    """A trigger or a view could undo what is written, in the same transaction, and leave every hash in order."""
    if found is not None:
        raise LedgerDamaged(
            f"the database holds {check.shown(found[0])}, a trigger or a view that Terrine did not make; nothing was "
            "charged and nothing was released; find out who put it there, and restore the ledger from an export"
        )
