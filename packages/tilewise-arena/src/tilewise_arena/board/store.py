"""The board as a whole: opening it, changing it, and reading it.

`open_board("board.sqlite")` is a file of its own; `open_board("postgresql+psycopg://…")` is a database. Beside the file
lies the key that seals the ledger; for a database its path is given or taken from TILEWISE_BOARD_KEY.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tilewise._atomic import write_atomic
from tilewise.bench.recipe import Recipe, check_name
from tilewise.bench.scoring import Score, check_ranked
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError

try:
    from sqlalchemy import func, select
    from sqlalchemy.exc import SQLAlchemyError

    from tilewise_arena.board import schema
    from tilewise_arena.board.chain import Link, board_key
    from tilewise_arena.board.transactions import BoardTransaction, recipe_of
except ImportError:
    raise UnavailableError("a board needs SQLAlchemy: pip install tilewise-fleet") from None

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Select

_SORTS = {"score": "score", "team": "team", "time": "id", "id": "id"}  # numbers are given in the order of time


def open_board(where: str | Path, *, create: bool = True, key: Path | None = None) -> Board:
    """Open the board in a SQLite file or at a database URL; with `create`, a new one if there is none."""
    url, path = _url(str(where))
    if path is not None and not create and not path.is_file():
        raise UnavailableError(f"there is no board at {path}")
    if path is not None and path.is_file() and (size := path.stat().st_size) < 100 and (size or not create):
        raise UnavailableError(f"{path} is not a board")  # and stays: SQLite would write over a file of one byte
    key_path = key or _key_path(path)
    engine = None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        engine = schema.new_engine(url)
        if create:
            schema.create_tables(engine)
        schema.check_tables(engine)
        with engine.connect() as connection:
            has_links = connection.execute(select(func.max(schema.ledger.c.seq))).scalar() is not None
        board_key_bytes = board_key(key_path, create=create and not has_links)
        if board_key_bytes is None and create:
            raise UnavailableError(
                f"the board's key is missing: there is none at {key_path}, and this board has entries that were sealed "
                "with one; put the key back (a backup made on the command line holds it) or name it with --key"
            )
    except UnavailableError:
        if engine is not None:
            engine.dispose()
        raise
    except (SQLAlchemyError, OSError, ModuleNotFoundError, UnicodeDecodeError) as error:
        if engine is not None:
            engine.dispose()
        raise UnavailableError(
            f"the board at {_without_password(str(where))} cannot be opened: {_reason(error)}"
        ) from None
    return Board(engine, board_key_bytes, path, key_path)


def _url(where: str) -> tuple[str, Path | None]:
    """Convert a board's location to an SQLAlchemy URL; also return the file's path (None for a server)."""
    if where.startswith("postgresql://"):
        return where.replace("postgresql://", "postgresql+psycopg://", 1), None
    if where.startswith("postgresql+psycopg://"):
        return where, None
    if "://" in where:
        raise ConfigurationError(f"a board is a file or a postgresql:// URL, not {_without_password(where)}")
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", where):
        raise ConfigurationError(f"a board is a file or a postgresql:// URL; a server's address is http://{where}")
    try:
        path = Path(where).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # links that lead in a circle, or a name that no file can have
        raise UnavailableError(f"there is no board at {where[:200]!r}") from None
    return f"sqlite:///{path}", path


def _key_path(path: Path | None) -> Path:
    """Return the key file's path: next to the SQLite file or, for a server, from TILEWISE_BOARD_KEY."""
    if path is not None:
        return path.with_name(path.name + ".key")
    path_from_environment = os.environ.get("TILEWISE_BOARD_KEY")
    return Path(path_from_environment) if path_from_environment else Path("tilewise-board.key")


def _without_password(where: str) -> str:
    """Return a URL with its password removed."""
    head, at, host = where.rpartition("@")
    return f"{head.split('//')[0]}//…@{host}" if at and "//" in head else where


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0][:200]


def _entry_conditions(event: str | None, division: str | None, status: str | None, team: str | None) -> list[Any]:
    """Build the SQL conditions that select entries; a team matches by any part of its name."""
    table = schema.entries
    filters = (("event", event), ("division", division), ("status", status))
    conditions: list[Any] = [table.c[name] == value for name, value in filters if value is not None]
    if team:
        names = _team_names()
        alike = func.lower(names.c.team).contains(team.lower(), autoescape=True)
        conditions.append(table.c.team.in_(select(names.c.team).where(alike)))
    return conditions


def _team_names() -> Any:
    """Build a query for distinct team names by recursive index scans, as there are few teams and many entries."""
    table = schema.entries
    names = select(func.min(table.c.team).label("team")).cte(recursive=True)
    next_team = select(func.min(table.c.team)).where(table.c.team > names.c.team).scalar_subquery()
    return names.union_all(select(next_team).where(names.c.team.is_not(None)))


def _ranks(
    connection: Connection, event: str, division: str, rows: list[dict[str, Any]], in_a_row: bool
) -> dict[int, int]:
    """Return the rank of each scored entry by its id; `in_a_row` promises that `rows` have consecutive ranks."""
    table = schema.entries
    scored = _entry_conditions(event, division, "scored", None)
    if in_a_row and rows:
        first = rows[0]
        better = (table.c.score > first["score"]) | ((table.c.score == first["score"]) & (table.c.id < first["id"]))
        ahead = connection.execute(select(func.count()).select_from(table).where(*scored, better)).scalar() or 0
        return {int(row["id"]): int(ahead) + at for at, row in enumerate(rows, 1)}
    rank = func.row_number().over(order_by=(table.c.score.desc(), table.c.id)).label("place")
    places = select(table.c.id, rank).where(*scored).subquery()
    ranked = connection.execute(select(places).where(places.c.id.in_([row["id"] for row in rows])))
    return {int(row.id): int(row.place) for row in ranked}


def _record_holder_query(event: str, division: str) -> Select[tuple[int]]:
    """Build a query for the entry that holds the record of an event and division."""
    table = schema.entries
    return select(table.c.id).where((table.c.event == event) & (table.c.division == division) & table.c.record)


@contextmanager
def readable(board: Board) -> Iterator[None]:
    """Convert errors about a damaged board, inside the block, to a `FileFormatError`."""
    try:
        yield
    except TilewiseError:
        raise
    except SQLAlchemyError as error:
        raise UnavailableError(f"the board cannot be read: {_reason(error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        where = "database" if board.path is None else str(board.path)
        raise FileFormatError(f"the board in {where} is damaged ({type(error).__name__})") from error


class Board:
    """A leaderboard. Reading needs no transaction; changes happen in `with board.write() as transaction`."""

    def __init__(self, engine: Engine, key: bytes | None, path: Path | None, key_path: Path) -> None:
        self.engine, self.key, self.path, self.key_path = engine, key, path, key_path

    def write_key(self) -> None:
        """Write the board's key to its file, after a restore."""
        assert self.key is not None
        write_atomic(self.key_path, self.key.hex() + "\n", private=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def write(self) -> Iterator[BoardTransaction]:
        """Open a transaction, committed at the end of the block or rolled back if it raises."""
        if self.key is None:
            raise UnavailableError("this board's key is missing, so nothing can be added to it")
        try:
            with self.engine.execution_options(writes=True).begin() as connection:
                schema.take_turn(connection)
                yield BoardTransaction(connection, self.key)
        except SQLAlchemyError as error:
            raise UnavailableError(f"the board did not take the change: {_reason(error)}") from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with readable(self), self.engine.connect() as connection:
            yield connection

    def _value(self, query: Any) -> Any:
        """Return the single value that a query selects, or None."""
        with self.read() as connection:
            return connection.execute(query).scalar()

    def add_scored(self, team: str, recipe: Recipe, score: Score) -> dict[str, Any]:
        """Add an entry that was measured on this machine, with its result, and return its receipt."""
        check_ranked(score.practice)
        files = {name: recipe.file_content(name) for name in recipe.files}
        with self.write() as transaction:
            receipt = transaction.submit(team, recipe.as_dict(), files, queue=False)
            transaction.result(receipt["entry"], "scored", score.as_dict())
            if transaction.connection.execute(_record_holder_query(recipe.event.name, "closed")).scalar() is None:
                transaction.record(receipt["entry"], 0.0, 1.0, None)
        return receipt | {"status": "scored", "score": score.score}

    # --- reading ---

    def team_statuses(self) -> dict[tuple[str, str, str], str]:
        """Return the status of the latest entry by team, event and division."""
        table = schema.entries
        query = select(table.c.team, table.c.event, table.c.division, table.c.status).order_by(table.c.id)
        with self.read() as connection:
            return {(row.team, row.event, row.division): str(row.status) for row in connection.execute(query)}

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Open a connection whose reads all see the board at the same moment."""
        level = {} if self.path is not None else {"isolation_level": "REPEATABLE READ"}
        with readable(self), self.engine.connect().execution_options(**level) as connection:
            yield connection

    def links(self, connection: Connection | None = None) -> Iterator[Link]:
        """Yield the links of the ledger in order."""
        query = select(schema.ledger).order_by(schema.ledger.c.seq)
        with contextlib.nullcontext(connection) if connection is not None else self.read() as reader:
            for row in reader.execute(query).yield_per(500):
                yield Link(**row._mapping)

    def head(self) -> tuple[int, str]:
        """Return (number, hash) of the ledger's last link; 0 and a hash of zeros for an empty ledger."""
        table = schema.ledger
        with self.read() as connection:
            row = connection.execute(select(table.c.seq, table.c.hash).order_by(table.c.seq.desc()).limit(1)).first()
        return (0, "0" * 64) if row is None else (int(row.seq), str(row.hash))

    def entries(
        self,
        event: str | None = None,
        division: str | None = None,
        status: str | None = None,
        team: str | None = None,
        sort: str = "score",
        limit: int = 100,
        offset: int = 0,
    ) -> list[dict[str, Any]]:
        """Return entries without their results, best first (or by team, time or number)."""
        table = schema.entries
        column = table.c[_SORTS.get(sort, "score")]
        order = column.desc().nulls_last() if sort in ("score", "time") else column.asc()
        conditions = select(table.c.id).where(*_entry_conditions(event, division, status, team))
        return self._rows(conditions.order_by(order, table.c.id).limit(limit).offset(offset))

    def best_of_teams(self, event: str, division: str) -> list[dict[str, Any]]:
        """Return the best scored entry of every team, best first."""
        table, other, names = schema.entries, schema.entries.alias(), _team_names()
        own = (other.c.event == event, other.c.division == division, other.c.team == names.c.team)
        best = select(other.c.id).where(*own, other.c.status == "scored").order_by(other.c.score.desc(), other.c.id)
        conditions = table.c.id.in_(select(best.limit(1).scalar_subquery()).select_from(names))
        return self._rows(select(table.c.id).where(conditions).order_by(table.c.score.desc(), table.c.id))

    def _rows(self, query: Any) -> list[dict[str, Any]]:
        """Return the listed columns of the entries that a query selects, in its order."""
        table = schema.entries
        columns = [column for column in table.c if column.name not in ("result", "recipe", "bytes")]
        with self.read() as connection:
            numbers = [int(row.id) for row in connection.execute(query)]
            rows: dict[int, dict[str, Any]] = {}
            for at in range(0, len(numbers), 500):
                some = select(*columns).where(table.c.id.in_(numbers[at : at + 500]))
                rows |= {int(row.id): dict(row._mapping) for row in connection.execute(some)}
        return [rows[number] for number in numbers if number in rows]

    def count(
        self, event: str | None = None, division: str | None = None, status: str | None = None, team: str | None = None
    ) -> int:
        """Count the entries with this event, division, status and team (None: any)."""
        query = (
            select(func.count()).select_from(schema.entries).where(*_entry_conditions(event, division, status, team))
        )
        return int(self._value(query) or 0)

    def teams_of(self, event: str) -> int:
        """Count the teams that have entered an event."""
        table = schema.entries
        return int(self._value(select(func.count(table.c.team.distinct())).where(table.c.event == event)) or 0)

    def standings(
        self, event: str, division: str, team: str = "", sort: str = "score", limit: int = 100, offset: int = 0
    ) -> list[dict[str, Any]]:
        """Return one page of an event's ranking: entries with rank and the figures of their results."""
        rows = self.entries(event, division, team=team or None, sort=sort, limit=limit, offset=offset)
        table = schema.entries
        numbers = [row["id"] for row in rows]
        with self.read() as connection:
            query = select(table.c.id, table.c.result).where(table.c.id.in_(numbers))
            results = {int(row.id): json.loads(row.result) for row in connection.execute(query) if row.result}
            scored = [row for row in rows if row["status"] == "scored"]
            ranks = _ranks(connection, event, division, scored, in_a_row=sort == "score" and not team)
        for row in rows:
            row["rank"] = ranks.get(row["id"])
        names = ("speedup", "memory_gain", "size_gain")
        with readable(self):
            for row in rows:
                result = results.get(row["id"], {})
                row |= {name: result.get(name) for name in names}
                row["accuracy"] = result.get("validation", {}).get("accuracy")
        return rows

    def entry(self, number: int) -> dict[str, Any] | None:
        """Return an entry with its recipe and result, or None."""
        row = self._row(number)
        if row is None:
            return None
        with readable(self):
            result = None if row.result is None else json.loads(row.result)
            return dict(row._mapping) | {"recipe": json.loads(row.recipe), "result": result}

    def _row(self, number: int) -> Any:
        with self.read() as connection:
            return connection.execute(select(schema.entries).where(schema.entries.c.id == number)).first()

    def recipe(self, number: int, folder: Path) -> Recipe:
        """Return the recipe of an entry after writing its files into `folder`."""
        row = self._row(number)
        if row is None:
            raise ConfigurationError(f"there is no entry {number} on this board")
        for name, content in self.files(number).items():
            check_name(name)
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        recipe = recipe_of(row)
        return Recipe(recipe.event, recipe.steps, recipe.name, recipe.predictions, folder)

    def files(self, number: int) -> dict[str, bytes]:
        """Return the files that came with an entry, by name; a plugin is under plugin.py."""
        body = self._submission(number)
        with readable(self):
            digests = dict(body["files"]) | ({"plugin.py": body["plugin"]} if body.get("plugin") else {})
        table = schema.files
        with self.read() as connection:
            return {
                name: bytes(connection.execute(select(table.c.content).where(table.c.digest == digest)).scalar() or b"")
                for name, digest in digests.items()
            }

    def _submission(self, number: int) -> Mapping[str, Any]:
        """Return the submission of an entry, as recorded in the ledger."""
        entries, ledger = schema.entries, schema.ledger
        with self.read() as connection:
            link = select(entries.c.link).where(entries.c.id == number).scalar_subquery()
            text_ = connection.execute(select(ledger.c.body).where(ledger.c.seq == link)).scalar()
            body: Mapping[str, Any] = json.loads(text_ or '{"files": {}}')
        return body

    def record(self, event: str, division: str) -> int | None:
        """Return the id of the entry that holds the record (the best confirmed score) of an event, or None."""
        row = self._value(_record_holder_query(event, division))
        return None if row is None else int(row)

    def records(self, event: str, division: str) -> list[dict[str, Any]]:
        """Return every record of an event in the order it was set, with score and team."""
        table, entries = schema.ledger, schema.entries
        query = select(table.c.at, table.c.body).where(table.c.kind == "record").order_by(table.c.seq)
        with self.read() as connection:
            links = [(str(row.at), json.loads(row.body)) for row in connection.execute(query)]
            links = [(at, body) for at, body in links if (body["event"], body["division"]) == (event, division)]
            select_holders = select(entries.c.id, entries.c.team, entries.c.score).where(
                entries.c.id.in_({int(body["entry"]) for _, body in links})
            )
            holders = {
                int(row.id): {"team": row.team, "score": row.score} for row in connection.execute(select_holders)
            }
        return [body | {"at": at} | holders[int(body["entry"])] for at, body in links if int(body["entry"]) in holders]

    def open_events(self) -> dict[str, bool]:
        with self.read() as connection:
            return {str(r.name): bool(r.open) for r in connection.execute(select(schema.events))}

    def running(self) -> dict[int, int]:
        """Return the heartbeat of each running entry by its id."""
        jobs = schema.jobs
        with self.read() as connection:
            rows = connection.execute(select(jobs.c.entry, jobs.c.beat).where(jobs.c.state == "running"))
            return {int(row.entry): int(row.beat) for row in rows}

    def waiting(self) -> int:
        """Count the entries in the queue, running ones included."""
        return int(self._value(select(func.count()).select_from(schema.jobs).where(schema.jobs.c.state != "done")) or 0)

    def teams(self) -> list[dict[str, Any]]:
        """Return the tokens without their hashes, the newest first."""
        table = schema.tokens
        columns = (table.c.id, table.c.team, table.c.role, table.c.created_at, table.c.revoked_at)
        with self.read() as connection:
            return [dict(r._mapping) for r in connection.execute(select(*columns).order_by(table.c.created_at.desc()))]
