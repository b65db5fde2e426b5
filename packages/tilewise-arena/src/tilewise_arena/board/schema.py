"""Tables of the board. `ledger` is the truth and is only ever added to; `entries` and `events` follow from it.

`entries` is kept so that a page needs no replay of the ledger; `verify` replays it and compares. `files` are the files
that recipes name, by content; `tokens` holds hashes of tokens only; `jobs` is the queue of re-runs; `sessions` are the
teachers who are signed in, by the hash of their cookie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    inspect,
    text,
)
from sqlalchemy.schema import CreateIndex

from tilewise.errors import UnavailableError

if TYPE_CHECKING:
    from sqlalchemy import Engine

metadata = MetaData()

ledger = Table(
    "ledger",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("at", String(32), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("body", Text, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("seal", String(64), nullable=False),
)
entries = Table(
    "entries",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("team", String(40), nullable=False, index=True),
    Column("event", String(32), nullable=False, index=True),
    Column("division", String(8), nullable=False),
    Column("name", String(80), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("recipe", Text, nullable=False),
    Column("submitted_at", String(32), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("score", Float),
    Column("result", Text),
    Column("reason", Text, nullable=False, default=""),
    Column("verified", Boolean, nullable=False, default=False),
    Column("record", Boolean, nullable=False, default=False),
    Column("bytes", Integer, nullable=False, default=0),  # what its submission added to the database
    Column("link", Integer, nullable=False, default=0),  # the seq of its submission
)
events = Table(
    "events", metadata, Column("name", String(32), primary_key=True), Column("open", Boolean, nullable=False)
)
files = Table(
    "files",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("team", String(40), nullable=False),
    Column("role", String(8), nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("revoked_at", String(32)),
)
jobs = Table(
    "jobs",
    metadata,
    Column("entry", Integer, primary_key=True, autoincrement=False),
    Column("state", String(8), nullable=False, index=True),  # queued, running, done
    Column("attempts", Integer, nullable=False, default=0),
    Column("worker", String(64), nullable=False, default=""),
    Column("beat", Integer, nullable=False, default=0),  # goes up while its worker lives
    Column("turn", Integer, nullable=False, default=0),  # when it was taken last, counted in jobs taken
    Column("seal", String(64), nullable=False, default=""),  # keyed hash of entry, state, attempts and turn
)

sessions = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("token", String(16), nullable=False),
    Column("until", Float, nullable=False),
    Column("seal", String(64), nullable=False, default=""),  # keyed hash of the other columns
)

_INDEXES = (  # rows are long, so places and counts are read off indexes that hold all they need
    "CREATE INDEX IF NOT EXISTS entries_places ON entries (event, division, status, score DESC, id, team)",
    "CREATE INDEX IF NOT EXISTS entries_of_teams ON entries (event, division, team, status, score DESC, id)",
    "CREATE INDEX IF NOT EXISTS entries_best ON entries (event, division, score DESC{last}, id)",
    "CREATE INDEX IF NOT EXISTS entries_latest ON entries (submitted_at)",
    "CREATE INDEX IF NOT EXISTS entries_queue ON entries (team, status)",
    "CREATE INDEX IF NOT EXISTS entries_kept ON entries (team, bytes)",
    "CREATE INDEX IF NOT EXISTS entries_held ON entries (event, division, record, id)",
    "CREATE INDEX IF NOT EXISTS ledger_kind ON ledger (kind, seq) WHERE kind = 'record'",
)
_APPEND_ONLY = {
    "sqlite": [
        f"CREATE TRIGGER IF NOT EXISTS ledger_no_{what} BEFORE {what} ON ledger "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is only ever added to'); END"
        for what in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        "CREATE OR REPLACE FUNCTION ledger_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the ledger is only ever added to'; END $$",
        "DROP TRIGGER IF EXISTS ledger_append_only ON ledger",
        "CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger "
        "FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse()",
    ],
}
_OBJECTS = {
    # with an index whose content differs from its table, and booleans that are neither
    "sqlite": "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND (type != 'table' OR sql LIKE '%CHECK%') "
    "UNION ALL SELECT integrity_check FROM pragma_integrity_check(1) WHERE integrity_check != 'ok' "
    "UNION ALL SELECT 'entry ' || id FROM entries WHERE record NOT IN (0, 1) OR verified NOT IN (0, 1)",
    "postgresql": "SELECT tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE NOT tgisinternal AND "
    "relname IN ('ledger', 'entries', 'events', 'files', 'tokens', 'jobs', 'sessions') AND tgenabled = 'O' "
    "UNION ALL SELECT rulename FROM pg_rules WHERE schemaname = current_schema()",
}
_LOCK = 0x74696C65  # "tile": one advisory lock per database for whoever appends


def new_engine(url: str) -> Engine:
    """Create a database engine with serialized writers and durable commits."""
    if not url.startswith("sqlite"):
        try:
            return create_engine(url, pool_size=8, max_overflow=8, pool_pre_ping=True)
        except ImportError:  # psycopg is missing, or finds no libpq on this machine
            raise UnavailableError("A board in PostgreSQL needs its driver: pip install tilewise-arena.") from None
    # Connections stay open: closing the last one makes SQLite merge its log into the file and wait for the disk.
    options = {"timeout": 60.0, "check_same_thread": False}
    engine = create_engine(url, pool_size=8, max_overflow=8, connect_args=options)

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: Any) -> None:
        """Set the options of a new SQLite connection."""
        connection.isolation_level = None  # transactions begin where we say so, not where the driver guesses
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "busy_timeout=60000",
            "cache_size=-16000",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def take_turn(connection: Any) -> None:
    """Lock the ledger in PostgreSQL; in SQLite, BEGIN IMMEDIATE has done so already."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _LOCK})


def foreign_objects(connection: Any) -> list[str]:
    """Return objects in a database that no board has: triggers, views, rules, indexes, odd values."""
    dialect = connection.dialect.name
    expected = {"ledger_append_only"}
    if dialect == "sqlite":
        statements = [*_APPEND_ONLY[dialect], *(statement.format(last="") for statement in _INDEXES)]
        statements += [str(CreateIndex(index)) for table in metadata.sorted_tables for index in table.indexes]
        expected = {statement.replace("IF NOT EXISTS ", "") for statement in statements}
    present = {str(row[0]) for row in connection.execute(text(_OBJECTS[dialect]))}
    return sorted(present - expected)


def check_tables(engine: Engine) -> None:
    """Raise if a table of the database is a view, because reading a view may compute without end."""
    views = sorted(set(inspect(engine).get_view_names()) & set(metadata.tables))
    if views:
        raise UnavailableError(f"this is not a board: its {views[0]} is a view, not a table")


def create_tables(engine: Engine) -> None:
    """Create missing tables, indexes and triggers."""
    with engine.execution_options(writes=True).begin() as connection:
        take_turn(connection)
        metadata.create_all(connection)
        last = "" if engine.dialect.name == "sqlite" else " NULLS LAST"  # SQLite sorts NULL last already
        indexes = [statement.format(last=last) for statement in _INDEXES]
        for statement in (*indexes, *_APPEND_ONLY.get(engine.dialect.name, [])):
            connection.execute(text(statement))
