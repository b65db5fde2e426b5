"""A store in PostgreSQL through SQLAlchemy: many machines write to it at once, each kind to its own partition.

`tables` creates and upgrades the tables. A lost connection, a deadlock or a restarting server loses no
measurements: a transaction is retried for a minute, and every row has a unique `uid`, so that a transaction whose
acknowledgement was lost is not written twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError
from tilewise.store.database import LOCK_TIMEOUT_S, Transaction, Values

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEASE_SECONDS = 30.0  # heartbeats come every 6 s; a machine that missed five has lost its claims
_OPEN_TIMEOUT_S = 5.0  # how long opening is retried: a wrong address should fail soon
_RECOVERY_MESSAGES = ("starting up", "recovery", "not yet accepting")
# Parts of messages of failures that may be over a moment later.
_TRANSIENT_MESSAGES = (
    "deadlock detected",
    "could not serialize",
    "connection",
    "server closed",
    "shut",
    "starting up",
    "recovery",
)
T = TypeVar("T")


class PostgresDatabase:
    """A store at a postgresql:// URL."""

    shared, lease_s, row_order_sql = True, LEASE_SECONDS, "id"
    lock_sql, skip_locked_sql = " FOR UPDATE", " FOR UPDATE OF queue SKIP LOCKED"
    now_sql = "extract(epoch from clock_timestamp())"

    def __init__(self, url: str, create: bool) -> None:
        """Connect to the server; create or upgrade the tables if `create` is true."""
        self.name, self._retry_seconds = without_password(url), _OPEN_TIMEOUT_S
        try:
            from sqlalchemy import create_engine, text
            from sqlalchemy.exc import SQLAlchemyError
        except ImportError:
            raise UnavailableError("A store in PostgreSQL needs SQLAlchemy: pip install tilewise-fleet.") from None
        self._text, self._error = text, SQLAlchemyError
        self._statements: dict[str, Any] = {}
        driver = driver_url(url)
        try:
            self.engine = create_engine(driver, pool_size=4, max_overflow=16, pool_pre_ping=True)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise UnavailableError(f"The store at {self.name} cannot be opened: {reason(error)}.") from None
        try:
            self._retry(lambda: self._check_tables(create))
        except BaseException:
            self.engine.dispose()
            raise
        self._retry_seconds = LOCK_TIMEOUT_S

    def _check_tables(self, create: bool) -> None:
        """Create or upgrade the tables if `create`; raise if there are none or they are too new."""
        from tilewise_fleet.tables import NEWEST, REVISIONS, stored_revision, upgrade

        with self.engine.connect() as connection:
            current = stored_revision(connection)
        if current == NEWEST:
            return
        if current is not None and current not in REVISIONS:
            raise FileFormatError(f"The store at {self.name} was created by a newer tilewise; update this one.")
        if current is None and not create:
            raise FileFormatError(f"There is no measurement store at {self.name}; `tilewise collect` creates one.")
        upgrade(self.engine)

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` as one transaction; repeat it after a transient failure."""

        def attempt() -> T:
            with self.engine.begin() as connection:
                return work(_PostgresTransaction(connection, self._statement))

        return self._retry(attempt)

    def read(self, query: str, values: Values | None = None) -> list[Any]:
        """Return all rows of a query."""
        return self.write(lambda transaction: transaction.fetch(query, values))

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def _statement(self, query: str) -> Any:
        """Return the SQLAlchemy statement of a query text; cached."""
        # Parsing a query text is slow compared with executing it, so parsed texts are cached.
        if query not in self._statements:
            self._statements[query] = self._text(query)
        return self._statements[query]

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`; repeat it with growing pauses while it fails for a transient reason."""
        start, pause = time.monotonic(), 0.05
        while True:
            try:
                return attempt()
            except self._error as error:
                # A server that is recovering exists, so it is waited for even while the store is being opened.
                recovers = any(text in reason(error).lower() for text in _RECOVERY_MESSAGES)
                seconds = LOCK_TIMEOUT_S if recovers else self._retry_seconds
                if not _is_transient(error) or time.monotonic() > start + seconds:
                    raise self._to_tilewise_error(error) from None
                time.sleep(pause)
                pause = min(1.0, 2 * pause)

    def _to_tilewise_error(self, error: Exception) -> TilewiseError:
        """Convert an error of SQLAlchemy to a `TilewiseError` of one sentence."""
        message = reason(error)
        if "password" in message or "authentication" in message or "permission denied" in message:
            return ConfigurationError(f"The store at {self.name} refuses access: {message}.")
        return UnavailableError(f"The store at {self.name} is not available: {message}.")


class _PostgresTransaction:
    """Executes statements on a SQLAlchemy connection."""

    def __init__(self, connection: Connection, statement: Callable[[str], Any]) -> None:
        self._connection, self._statement = connection, statement

    def fetch(self, query: str, values: Values | None = None) -> list[Any]:
        return [tuple(row) for row in self._connection.execute(self._statement(query), values or {})]

    def execute(self, query: str, values: Values | None = None) -> int:
        return int(self._connection.execute(self._statement(query), values or {}).rowcount)

    def execute_many(self, query: str, values: Sequence[Values]) -> None:
        if values:
            self._connection.execute(self._statement(query), [dict(row) for row in values])


def driver_url(url: str) -> str:
    """Return the URL with SQLAlchemy's driver named in its scheme: postgresql+psycopg://."""
    scheme, _, address = url.partition("://")
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ConfigurationError(f"A store is a file or a postgresql:// URL, not {without_password(url)}.")
    return f"postgresql+psycopg://{address}"


def without_password(url: str) -> str:
    """Return the URL without user name and password, for messages."""
    return re.sub(r"(?<=://)[^/@]*@", "…@", re.sub(r"(?i)(password=)[^&]*", r"\1…", url))


def reason(error: Exception) -> str:
    """Return the first line of a database error's message, shortened."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0][:200].rstrip(".")


def _is_transient(error: Any) -> bool:
    """Tell whether a database error may vanish on repetition, such as a lost connection or a deadlock."""
    if getattr(error, "connection_invalidated", False):
        return True
    if type(error).__name__ not in ("OperationalError", "InterfaceError"):
        return False
    message = reason(error).lower()
    return any(text in message for text in _TRANSIENT_MESSAGES)
