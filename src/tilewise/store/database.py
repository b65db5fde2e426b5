"""The database of a store: a SQLite file, or (`tilewise_fleet/postgres.py`) a PostgreSQL database that machines share.

Both execute the same SQL with named parameters. `write` runs a function as one atomic, durable transaction; failures
become errors of one sentence. The SQLite file needs nothing but Python. Its format is 1 since the first version: newer
columns and tables are added when a file is opened, and older versions of tilewise, which do not use them, can still
read and write the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tilewise._files import open_input
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError

FORMAT = 1
MAX_STORE_BYTES = 16 << 30
LOCK_TIMEOUT_S = 60.0  # how long a writer waits for other writers
_MIN_FILE_BYTES = 100  # size of SQLite's header
_APPLICATION_ID = 0x74776D73  # "twms", in the file's header
_TABLES = """
CREATE TABLE machine (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, identity TEXT NOT NULL, details TEXT NOT NULL,
    UNIQUE (kind, identity, details));
CREATE TABLE run (id INTEGER PRIMARY KEY, machine INTEGER NOT NULL REFERENCES machine, started REAL NOT NULL,
    seed INTEGER NOT NULL, settings TEXT NOT NULL);
CREATE TABLE kernel (id INTEGER PRIMARY KEY, program TEXT NOT NULL, problem TEXT NOT NULL UNIQUE);
CREATE TABLE config (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE batch (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run,
    kernel INTEGER NOT NULL REFERENCES kernel, round INTEGER NOT NULL, taken REAL NOT NULL, default_ns REAL NOT NULL,
    disturbed INTEGER NOT NULL, watch TEXT NOT NULL);
CREATE TABLE timing (batch INTEGER NOT NULL REFERENCES batch, config INTEGER NOT NULL REFERENCES config,
    runtime_ps INTEGER NOT NULL, PRIMARY KEY (batch, config)) WITHOUT ROWID;
CREATE TABLE verdict (run INTEGER NOT NULL REFERENCES run, kernel INTEGER NOT NULL REFERENCES kernel,
    config INTEGER NOT NULL REFERENCES config, status TEXT NOT NULL, reason TEXT NOT NULL, details TEXT NOT NULL);
CREATE TABLE finished (run INTEGER NOT NULL REFERENCES run, kernel INTEGER NOT NULL REFERENCES kernel,
    default_config INTEGER NOT NULL REFERENCES config, seconds REAL NOT NULL, PRIMARY KEY (run, kernel));
CREATE TABLE claim (kernel INTEGER PRIMARY KEY REFERENCES kernel, run INTEGER NOT NULL, host TEXT NOT NULL,
    process INTEGER NOT NULL, born TEXT NOT NULL, taken REAL NOT NULL);
CREATE INDEX batch_of_kernel ON batch (kernel, run);
CREATE INDEX verdict_of_kernel ON verdict (kernel, run);
"""
# Columns and tables that files of older versions lack. A `uid` is unique in all stores, so that merging twice changes
# nothing; `part` is the partition of a shared store, and empty in a file, which has one kind of machine.
_LATER_COLUMNS = (
    ("run", "uid", "TEXT"),
    ("batch", "uid", "TEXT"),
    ("kernel", "part", "TEXT NOT NULL DEFAULT ''"),
    ("queue", "part", "TEXT NOT NULL DEFAULT ''"),
)
_LATER = """
CREATE UNIQUE INDEX IF NOT EXISTS run_uid ON run (uid);
CREATE UNIQUE INDEX IF NOT EXISTS batch_uid ON batch (uid);
CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, kernel INTEGER NOT NULL UNIQUE REFERENCES kernel,
    priority REAL NOT NULL, why TEXT NOT NULL, added REAL NOT NULL, part TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS token (id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    created REAL NOT NULL, revoked REAL);
"""
Values = Mapping[str, Any]
T = TypeVar("T")


class Transaction(Protocol):
    """An open transaction."""

    def fetch(self, query: str, values: Values | None = None) -> list[Any]:
        """Return all rows of a query."""

    def execute(self, query: str, values: Values | None = None) -> int:
        """Execute a statement; return the number of affected rows."""

    def execute_many(self, query: str, values: Sequence[Values]) -> None:
        """Execute a statement for each set of values."""


class Database(Protocol):
    """A database that contains a store; the attributes ending in ``_sql`` are fragments of its SQL dialect."""

    name: str  # for messages, without a password
    shared: bool  # by machines of several kinds; then batches are written at once, and claims are leases
    lease_s: float  # how long a claim of another machine is valid without a heartbeat
    now_sql: str  # seconds since 1970 by the database's clock, which all machines share
    row_order_sql: str  # column that orders the rows of a table without a primary key
    lock_sql: str  # suffix that locks the selected rows until the end of the transaction
    skip_locked_sql: str  # suffix that also skips queue rows locked by others

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` as one transaction; it may be called again if the connection was lost."""

    def read(self, query: str, values: Values | None = None) -> list[Any]:
        """Return all rows of a query."""

    def close(self) -> None:
        """Close the connections."""


def is_url(where: str | os.PathLike[str]) -> bool:
    """Return whether a store's location is a URL, not a path."""
    return isinstance(where, str) and "://" in where


def open_database(where: str | os.PathLike[str], create: bool) -> Database:
    """Open the database at a path or a postgresql:// URL."""
    if is_url(where):
        from tilewise._addons import require

        postgres: Any = require("tilewise_fleet.postgres", "A store in PostgreSQL")
        database: Database = postgres.PostgresDatabase(str(where), create)
        return database
    return SqliteDatabase(Path(where), create)


class SqliteDatabase:
    """A store in a SQLite file."""

    shared, lease_s, row_order_sql, lock_sql, skip_locked_sql = False, 900.0, "rowid", "", ""
    now_sql = "((julianday('now') - 2440587.5) * 86400.0)"

    def __init__(self, path: Path, create: bool) -> None:
        """Open the file; create it if it does not exist and `create` is true."""
        self.path, self.name = path, str(path)
        if not create and not path.exists():
            raise FileFormatError(f"{path} does not exist; `tilewise collect` creates a store.")
        if os.path.lexists(path):
            open_input(path, MAX_STORE_BYTES).close()
            # SQLite takes a file of one byte, or an empty one, for a new database and overwrites it.
            size = path.stat().st_size
            if size < _MIN_FILE_BYTES and (size or not create):
                raise FileFormatError(f"{path} is not a measurement store; `tilewise collect` creates one.")
        try:
            # Autocommit: transactions begin explicitly as write transactions, so that two writers wait for each other.
            self.connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            self._open()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._close_quietly()
            raise self._to_tilewise_error(error) from error
        except TilewiseError:
            self._close_quietly()
            raise

    def _close_quietly(self) -> None:
        """Close the connection of a file that could not be opened, which releases its locks."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self.connection.close()

    def _open(self) -> None:
        """Check that the file is a store of this version, and create or complete its tables."""
        db = self.connection
        db.execute("PRAGMA busy_timeout = 60000")
        # The file may come from anyone: no functions in its schema, and a check of every page.
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        # The order matters: if another process creates the tables in between, its application id is already there.
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        # A view, trigger or virtual table with the name of one of our tables could execute arbitrary SQL.
        foreign = """SELECT count(*) FROM sqlite_master
            WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"""
        if tables and (application != _APPLICATION_ID or db.execute(foreign).fetchone()[0]):
            raise FileFormatError(f"{self.path} is a database, but not a measurement store of tilewise.")
        self._enable_wal()
        db.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            self.write(lambda _: self._create_tables())
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT:
            raise FileFormatError(
                f"{self.path} is a store of format {version} and this tilewise reads format {FORMAT}; "
                f"use the tilewise that wrote it, or another --out."
            )
        if self._missing_columns():
            self.write(lambda _: self._upgrade())

    def _create_tables(self) -> None:
        """Create the tables in a transaction, unless another process has created them meanwhile."""
        db = self.connection
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            self._upgrade()

    def _missing_columns(self) -> list[tuple[str, str, str]]:
        """Return (table, name, type) of the columns of newer versions that the file lacks."""
        missing_columns = []
        for table, column, sql_type in _LATER_COLUMNS:
            columns = {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}
            if columns and column not in columns:
                missing_columns.append((table, column, sql_type))
        return missing_columns

    def _upgrade(self) -> None:
        """Add missing columns, indexes and tables to an older file, in a transaction."""
        for table, column, sql_type in self._missing_columns():
            self.connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {sql_type}")
        for statement in _LATER.split(";"):
            self.connection.execute(statement)

    def _enable_wal(self) -> None:
        """Enable write-ahead logging, so that readers and writers do not wait for each other.

        SQLite refuses a process that enables it while another one does, without waiting; such a process retries.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while self.connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                self.connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` as one transaction; roll back on any exception."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self)
                self.connection.execute("COMMIT")
                return result
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._to_tilewise_error(error) from error

    def read(self, query: str, values: Values | None = None) -> list[Any]:
        """Run a query and return all of its rows."""
        try:
            return self.fetch(query, values)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._to_tilewise_error(error) from error

    # The statements of a transaction. A connection has one at a time.

    def fetch(self, query: str, values: Values | None = None) -> list[Any]:
        return self.connection.execute(query, values or {}).fetchall()

    def execute(self, query: str, values: Values | None = None) -> int:
        return self.connection.execute(query, values or {}).rowcount

    def execute_many(self, query: str, values: Sequence[Values]) -> None:
        self.connection.executemany(query, values)

    def copy(self, path: str | os.PathLike[str]) -> None:
        """Write a consistent copy to `path` while others may write."""
        target = sqlite3.connect(path)
        try:
            self.connection.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            raise self._to_tilewise_error(error) from error
        finally:
            target.close()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _to_tilewise_error(self, error: sqlite3.Error | UnicodeDecodeError) -> TilewiseError:
        """Convert an error of SQLite to one that names the file and says what to do."""
        text = str(error)
        if "full" in text or "disk I/O" in text:
            return ConfigurationError(
                f"The disk with {self.path} is full; all finished measurements are saved: make room and start again."
            )
        if "locked" in text or "busy" in text:
            return ConfigurationError(f"{self.path} has been in use by another process for a minute; try again.")
        if "unable to open" in text or "readonly" in text:
            return ConfigurationError(f"{self.path} cannot be written; choose another place for the store.")
        return FileFormatError(f"{self.path} is not a readable measurement store ({text[:200]}).")
