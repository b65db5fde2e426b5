"""Where a store lives: one SQLite file, or (`postgres.py`) a database that many machines share.

Both are asked in the same SQL with named values. A home runs a piece of work as one transaction that is whole on the
disk, or never happened; what it cannot do it says in one sentence. The file needs nothing but Python. It is of format 1
since the first version: columns and tables that came later are added when a file is opened, and older versions, which
do not ask for them, go on reading and writing it.
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
MOST_STORE_BYTES = 16 << 30
PATIENCE = 60.0  # seconds for others to get out of the way
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
# What a file of an older version lacks. `uid` is one name everywhere, so that nothing is taken over twice; `part` is
# empty in a file, which holds one kind of machine.
_LATER_COLUMNS = (("run", "uid", "TEXT"), ("batch", "uid", "TEXT"), ("kernel", "part", "TEXT NOT NULL DEFAULT ''"))
_LATER = """
CREATE UNIQUE INDEX IF NOT EXISTS run_uid ON run (uid);
CREATE UNIQUE INDEX IF NOT EXISTS batch_uid ON batch (uid);
CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, kernel INTEGER NOT NULL UNIQUE REFERENCES kernel,
    priority REAL NOT NULL, why TEXT NOT NULL, added REAL NOT NULL);
CREATE TABLE IF NOT EXISTS token (id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    created REAL NOT NULL, revoked REAL);
"""
Values = Mapping[str, Any]
T = TypeVar("T")


class Rows(Protocol):
    """An open transaction."""

    def all(self, query: str, values: Values | None = None) -> list[Any]: ...
    def run(self, query: str, values: Values | None = None) -> int:
        """How many rows it changed."""

    def many(self, query: str, values: Sequence[Values]) -> None: ...


class Home(Protocol):
    """A database with a store in it."""

    name: str  # for sentences; without a password
    shared: bool  # by machines of several kinds; then a batch travels whole, and claims are leases
    lease_s: float  # how long a claim of another machine is believed without a beat
    now: str  # seconds since 1970, in SQL: the database's clock is the one that all share
    order: str  # of the rows of a table without a number of its own
    lock: str  # a row that is read, until the end of the transaction
    skip: str  # ... of these, only those that nobody else has locked

    def change(self, work: Callable[[Rows], T]) -> T:
        """Carry out `work` as one transaction. It may be called again where the connection was lost."""

    def read(self, query: str, values: Values | None = None) -> list[Any]: ...
    def close(self) -> None: ...


def is_url(where: str | os.PathLike[str]) -> bool:
    return isinstance(where, str) and "://" in where


def open_home(where: str | os.PathLike[str], create: bool) -> Home:
    """The home that a path or a postgresql:// URL names."""
    if is_url(where):
        from tilewise.store.postgres import Postgres

        return Postgres(str(where), create)
    return SqliteFile(Path(where), create)


class SqliteFile:
    """A store in a file."""

    shared, lease_s, order, lock, skip = False, 900.0, "rowid", "", ""
    now = "((julianday('now') - 2440587.5) * 86400.0)"

    def __init__(self, path: Path, create: bool) -> None:
        self.path, self.name = path, str(path)
        if not create and not path.exists():
            raise FileFormatError(f"{path} does not exist; `tilewise collect` makes a store.")
        if os.path.lexists(path):
            open_input(path, MOST_STORE_BYTES).close()
            self._refuse_scraps(create)
        try:
            # Autocommit: transactions are begun explicitly, and as writers, so that two of them queue up.
            self.connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
            self._rows = _SqliteRows(self.connection)
            self._open()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._let_go()
            raise self._sentence(error) from error
        except TilewiseError:
            self._let_go()
            raise

    def _refuse_scraps(self, create: bool) -> None:
        """SQLite takes a file of one byte for a new database and writes over it, and an empty one that is only read."""
        size = self.path.stat().st_size
        if size < 100 and (size or not create):
            raise FileFormatError(f"{self.path} is no measurement store; `tilewise collect` makes one.")

    def _let_go(self) -> None:
        """Hold no lock on a file that could not be opened."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self.connection.close()

    def _open(self) -> None:
        db = self.connection
        db.execute("PRAGMA busy_timeout = 60000")
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        # In this order: whoever makes the tables in between has written its name when they are seen.
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        # A view, trigger or virtual table under one of our names would run what its writer wished.
        foreign = """SELECT count(*) FROM sqlite_master
            WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"""
        if tables and (application != _APPLICATION_ID or db.execute(foreign).fetchone()[0]):
            raise FileFormatError(f"{self.path} is a database, but not a measurement store of tilewise.")
        self._keep_a_log()
        db.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            self.change(lambda _: self._make())
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT:
            raise FileFormatError(
                f"{self.path} is a store of format {version} and this tilewise reads format {FORMAT}; "
                f"use the tilewise that wrote it, or another --out."
            )
        if self._lacks():
            self.change(lambda _: self._add_later())

    def _make(self) -> None:
        db = self.connection
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            self._add_later()

    def _lacks(self) -> list[tuple[str, str, str]]:
        found = []
        for table, column, kind in _LATER_COLUMNS:
            columns = {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}
            found += [(table, column, kind)] if columns and column not in columns else []
        return found

    def _add_later(self) -> None:
        for table, column, kind in self._lacks():
            self.connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        for statement in _LATER.split(";"):
            self.connection.execute(statement)

    def _keep_a_log(self) -> None:
        """Write-ahead logging, so that readers and writers do not wait for each other. Two processes that open a new
        store at once are refused at once, without the usual waiting, and have to try again."""
        until = time.monotonic() + PATIENCE
        while self.connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                self.connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def change(self, work: Callable[[Rows], T]) -> T:
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._rows)
                self.connection.execute("COMMIT")
                return result
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._sentence(error) from error

    def read(self, query: str, values: Values | None = None) -> list[Any]:
        try:
            return self._rows.all(query, values)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._sentence(error) from error

    def copy(self, path: str | os.PathLike[str]) -> None:
        """A consistent copy while others write."""
        target = sqlite3.connect(path)
        try:
            self.connection.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            raise self._sentence(error) from error
        finally:
            target.close()

    def close(self) -> None:
        self.connection.close()

    def _sentence(self, error: sqlite3.Error | UnicodeDecodeError) -> TilewiseError:
        text = str(error)
        if "full" in text or "disk I/O" in text:
            return ConfigurationError(
                f"The disk with {self.path} is full; what was measured so far is safe in it: make room and start again."
            )
        if "locked" in text or "busy" in text:
            return ConfigurationError(f"{self.path} has been in use by another process for a minute; try again.")
        if "unable to open" in text or "readonly" in text:
            return ConfigurationError(f"{self.path} cannot be written; choose another place for the store.")
        return FileFormatError(f"{self.path} is not a readable measurement store ({text[:200]}).")


class _SqliteRows:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def all(self, query: str, values: Values | None = None) -> list[Any]:
        return self._connection.execute(query, values or {}).fetchall()

    def run(self, query: str, values: Values | None = None) -> int:
        return self._connection.execute(query, values or {}).rowcount

    def many(self, query: str, values: Sequence[Values]) -> None:
        self._connection.executemany(query, values)
