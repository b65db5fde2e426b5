"""A store in PostgreSQL, by SQLAlchemy: many machines measure into it at once, each kind into a part of its own.

Its tables are made and brought up to date by Alembic (`migrations`). A lost connection, a deadlock or a server that is
being started again costs patience, not measurements: a transaction is tried again for a minute, and every row has a
name of its own (`uid`), so that one whose answer was lost on the way is not written twice.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError
from tilewise.store.home import PATIENCE, Rows, Values

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

LEASE_SECONDS = 30.0
_PATIENCE_TO_OPEN = 5.0
_MIGRATING = 0x74776D73  # one advisory lock for whoever makes the tables
_PASSING = (
    "deadlock detected",
    "could not serialize",
    "connection",
    "server closed",
    "shut",
    "starting up",
    "recovery",
)
T = TypeVar("T")


class Postgres:
    """A store behind a postgresql:// URL."""

    shared, lease_s, order, lock, skip = True, LEASE_SECONDS, "id", " FOR UPDATE", " FOR UPDATE OF queue SKIP LOCKED"
    now = "extract(epoch from clock_timestamp())"

    def __init__(self, url: str, create: bool) -> None:
        self.name, self._patience = without_password(url), _PATIENCE_TO_OPEN
        try:
            from sqlalchemy import create_engine, text
            from sqlalchemy.exc import SQLAlchemyError
        except ImportError:
            raise UnavailableError("A store in PostgreSQL needs SQLAlchemy: pip install tilewise-fleet.") from None
        self._text, self._error = text, SQLAlchemyError
        self._texts: dict[str, Any] = {}
        driver = driver_url(url)
        try:
            self.engine = create_engine(driver, pool_size=4, max_overflow=16, pool_pre_ping=True)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise UnavailableError(f"The store at {self.name} cannot be opened: {reason(error)}.") from None
        try:
            self._try(lambda: self._ready(create))
        except BaseException:
            self.engine.dispose()
            raise
        self._patience = PATIENCE

    def _ready(self, create: bool) -> None:
        """The tables are there, and up to date."""
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        with self.engine.connect() as connection:
            now = MigrationContext.configure(connection).get_current_revision()
        with migrations() as folder:
            newest = ScriptDirectory(folder).get_current_head()
            known = {script.revision for script in ScriptDirectory(folder).walk_revisions()}
        if now == newest:
            return
        if now is not None and now not in known:
            raise FileFormatError(f"The store at {self.name} was made by a newer tilewise; update this one.")
        if now is None and not create:
            raise FileFormatError(f"There is no measurement store at {self.name}; `tilewise collect` makes one.")
        upgrade(self.engine)

    def change(self, work: Callable[[Rows], T]) -> T:
        def once() -> T:
            with self.engine.begin() as connection:
                return work(_Rows(connection, self._statement))

        return self._try(once)

    def read(self, query: str, values: Values | None = None) -> list[Any]:
        return self.change(lambda rows: rows.all(query, values))

    def close(self) -> None:
        self.engine.dispose()

    def _statement(self, query: str) -> Any:
        if query not in self._texts:
            self._texts[query] = self._text(query)
        return self._texts[query]

    def _try(self, once: Callable[[], T]) -> T:
        until, pause = time.monotonic() + self._patience, 0.05
        while True:
            try:
                return once()
            except self._error as error:
                if not _passes(error) or time.monotonic() > until:
                    raise self._sentence(error) from None
                time.sleep(pause)
                pause = min(1.0, 2 * pause)

    def _sentence(self, error: Exception) -> TilewiseError:
        said = reason(error)
        if "password" in said or "authentication" in said or "permission denied" in said:
            return ConfigurationError(f"The store at {self.name} refuses: {said}.")
        return UnavailableError(f"The store at {self.name} does not take this now: {said}.")


class _Rows:
    def __init__(self, connection: Connection, statement: Callable[[str], Any]) -> None:
        self._connection, self._statement = connection, statement

    def all(self, query: str, values: Values | None = None) -> list[Any]:
        return [tuple(row) for row in self._connection.execute(self._statement(query), values or {})]

    def run(self, query: str, values: Values | None = None) -> int:
        return int(self._connection.execute(self._statement(query), values or {}).rowcount)

    def many(self, query: str, values: Sequence[Values]) -> None:
        if values:
            self._connection.execute(self._statement(query), [dict(row) for row in values])


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the tables up to date; several processes that try at once take turns."""
    try:
        from alembic import command
        from alembic.config import Config
    except ImportError:
        raise UnavailableError("A store in PostgreSQL needs Alembic: pip install tilewise-fleet.") from None
    from sqlalchemy import text

    with migrations() as folder, engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _MIGRATING})
        config = Config()
        config.set_main_option("script_location", folder)
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


@contextlib.contextmanager
def migrations() -> Any:
    """The folder of Alembic's scripts."""
    with importlib.resources.as_file(importlib.resources.files("tilewise.store") / "migrations") as folder:
        yield str(folder)


def driver_url(url: str) -> str:
    """The URL with the driver's name in it."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ConfigurationError(f"A store is a file or a postgresql:// URL, not {without_password(url)}.")
    return f"postgresql+psycopg://{rest}"


def without_password(url: str) -> str:
    return re.sub(r"(?<=://)[^/@]*@", "…@", re.sub(r"(?i)(password=)[^&]*", r"\1…", url))


def reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0][:200].rstrip(".")


def _passes(error: Any) -> bool:
    """Whether it may work a moment later."""
    if getattr(error, "connection_invalidated", False):
        return True
    said = reason(error).lower()
    return type(error).__name__ in ("OperationalError", "InterfaceError") and any(word in said for word in _PASSING)
