"""The measurement store: one SQLite file that is only ever appended to.

Each timing is a transaction of its own: a killed collector loses at most what it was timing and continues where it
stopped. A batch is opened with the default's first reading and closed with its verdict; one that a killed collector
left open is judged by the next.
Several collectors may write to one store: a kernel is claimed before it is measured, and a claim whose process is gone
is free again. A store remembers what machine and versions it was made with and says so when another one wants to add to
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._files import open_input, parse_json
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.tune.problem import Config, Kernel, Problem

FORMAT = 1
MOST_STORE_BYTES = 16 << 30
_LARGEST = 1 << 53  # whole numbers up to here are exact as floats
_LONGEST = 1e18  # nanoseconds or picoseconds that still fit into 64 bits
_LATEST = 253402300799.0  # the last second that a date can have
_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_PATIENCE = 60.0  # seconds
_OPEN = 2  # in place of a batch's verdict, while there is none; older versions read it as disturbed
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


@dataclass(frozen=True)
class Machine:
    """Who measured. Stores are mixed only between equal `identity`s (the GPU's name; the CPU's model)."""

    kind: str  # "triton" or "cpu"
    identity: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class VerdictRow:
    """One configuration's verdict; `status` ok, misfit, wrong, failed or slow."""

    config: Config
    status: str
    reason: str = ""
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class BatchRow:
    """One batch as it was taken: the default's time, and the others' by the text of their configuration."""

    run: int
    default_ns: float
    disturbed: bool
    taken: float
    runtime_ns: dict[str, float]
    number: int = 0
    round: int = 0
    open: bool = False  # not judged yet; `disturbed` too, until it is


class Store:
    """An open store. Use as a context manager, or `close` it."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self.path = Path(path)
        if not create and not self.path.exists():
            raise FileFormatError(f"{self.path} does not exist; `tilewise collect` makes a store.")
        if os.path.lexists(self.path):
            open_input(self.path, MOST_STORE_BYTES).close()
        try:
            # Autocommit: transactions are begun explicitly, and as writers, so that two of them queue up.
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            self._open()
        except sqlite3.Error as error:
            raise self._sentence(error) from error
        self._configs: dict[str, int] = {}
        self._parsed: dict[str, Config] = {}
        self._kernels: dict[str, int] = {}

    def _open(self) -> None:
        self._db.execute("PRAGMA busy_timeout = 60000")
        self._db.execute("PRAGMA trusted_schema = OFF")
        self._db.execute("PRAGMA cell_size_check = ON")
        # In this order: whoever makes the tables in between has written its name when they are seen.
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        # A view, trigger or virtual table under one of our names would run what its writer wished.
        foreign = """SELECT count(*) FROM sqlite_master
            WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"""
        if tables and (application != _APPLICATION_ID or self._db.execute(foreign).fetchone()[0]):
            raise FileFormatError(f"{self.path} is a database, but not a measurement store of tilewise.")
        self._keep_a_log()
        self._db.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            with self._write():
                if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in _TABLES.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT:
            raise FileFormatError(
                f"{self.path} is a store of format {version} and this tilewise reads format {FORMAT}; "
                f"use the tilewise that wrote it, or another --out."
            )

    def _keep_a_log(self) -> None:
        """Write-ahead logging, so that readers and writers do not wait for each other. Two processes that open a new
        store at once are refused at once, without the usual waiting, and have to try again."""
        until = time.monotonic() + _PATIENCE
        while self._db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """A transaction that is whole on disk, or never happened."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._sentence(error) from error

    def _sentence(self, error: sqlite3.Error) -> TilewiseError:
        text = str(error)
        if "full" in text or "disk I/O" in text:
            return ConfigurationError(
                f"The disk with {self.path} is full; what was measured so far is safe in it: make room and start again."
            )
        if "locked" in text or "busy" in text:
            return ConfigurationError(f"{self.path} has been in use by another process for a minute; try again.")
        if "unable to open" in text or "readonly" in text:
            return ConfigurationError(f"{self.path} cannot be written; choose another --out.")
        return FileFormatError(f"{self.path} is not a readable measurement store ({text}).")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def begin(self, machine: Machine, seed: int, settings: Mapping[str, Any]) -> int:
        """Start a run and return its number; refuse where the store belongs to another kind of machine."""
        for kind, identity in self._all("SELECT DISTINCT kind, identity FROM machine"):
            if (kind, identity) != (machine.kind, machine.identity):
                raise ConfigurationError(
                    f"{self.path} was measured on {identity} ({kind}), and this is {machine.identity} "
                    f"({machine.kind}); give another --out, since runtimes of two machines must not be mixed."
                )
        details = json.dumps(machine.details, sort_keys=True)
        row = (machine.kind, machine.identity, details)
        with self._write():
            self._db.execute("INSERT OR IGNORE INTO machine (kind, identity, details) VALUES (?, ?, ?)", row)
            found = self._db.execute("SELECT id FROM machine WHERE kind=? AND identity=? AND details=?", row).fetchone()
            cursor = self._db.execute(
                "INSERT INTO run (machine, started, seed, settings) VALUES (?, ?, ?, ?)",
                (found[0], time.time(), seed, json.dumps(settings, sort_keys=True)),
            )
        return int(cursor.lastrowid or 0)

    def claim(self, run: int, kernel: Kernel, *, again: bool = False) -> bool:
        """Take a kernel for this process; False if a living process holds it or, unless `again`, it is finished."""
        with self._write():
            number = self._kernel(kernel)
            if not again and self._db.execute("SELECT 1 FROM finished WHERE kernel=? LIMIT 1", (number,)).fetchone():
                return False
            query = "SELECT host, process, born, taken FROM claim WHERE kernel=?"
            held = self._db.execute(query, (number,)).fetchone()
            if held and tuple(held[:3]) != _process() and _holds(*held):
                return False
            values = (number, run, *_process(), time.time())
            self._db.execute("INSERT OR REPLACE INTO claim VALUES (?, ?, ?, ?, ?, ?)", values)
        return True

    def add_verdicts(self, run: int, kernel: Kernel, verdicts: Sequence[VerdictRow]) -> None:
        with self._write():
            number = self._kernel(kernel)
            rows = [(run, number, self._config(v.config), v.status, v.reason, _short(v.details)) for v in verdicts]
            self._db.executemany("INSERT INTO verdict VALUES (?, ?, ?, ?, ?, ?)", rows)

    def add_batch(
        self,
        run: int,
        kernel: Kernel,
        round_number: int,
        default_ns: float,
        timings: Sequence[tuple[Config, float]],
        *,
        disturbed: bool = False,
        watch: Mapping[str, float] | None = None,
    ) -> None:
        """Append one batch: all of it, or nothing."""
        with self._write():
            cursor = self._db.execute(
                "INSERT INTO batch (run, kernel, round, taken, default_ns, disturbed, watch) VALUES (?,?,?,?,?,?,?)",
                (
                    run,
                    self._kernel(kernel),
                    round_number,
                    time.time(),
                    default_ns,
                    int(disturbed),
                    _short(watch),
                ),
            )
            rows = [(cursor.lastrowid, self._config(config), _ps(runtime_ns)) for config, runtime_ns in timings]
            self._db.executemany("INSERT INTO timing VALUES (?, ?, ?)", rows)

    def open_batch(self, run: int, kernel: Kernel, round_number: int, default_ns: float) -> int:
        """Begin a batch whose timings come one by one; gives its number."""
        with self._write():
            cursor = self._db.execute(
                "INSERT INTO batch (run, kernel, round, taken, default_ns, disturbed, watch) VALUES (?,?,?,?,?,?,?)",
                (run, self._kernel(kernel), round_number, time.time(), default_ns, _OPEN, ""),
            )
        return int(cursor.lastrowid or 0)

    def add_timing(self, batch: int, config: Config, runtime_ns: float) -> None:
        """One timing of an open batch."""
        with self._write():
            self._db.execute("INSERT INTO timing VALUES (?, ?, ?)", (batch, self._config(config), _ps(runtime_ns)))

    def close_batch(
        self, batch: int, default_ns: float, *, disturbed: bool, watch: Mapping[str, float] | None = None
    ) -> None:
        """Judge an open batch. This is the only row that is ever changed."""
        with self._write():
            self._db.execute(
                "UPDATE batch SET default_ns = ?, disturbed = ?, watch = ? WHERE id = ? AND disturbed = ?",
                (default_ns, int(disturbed), _short(watch), batch, _OPEN),
            )

    def finish(self, run: int, kernel: Kernel, default: Config, seconds: float) -> None:
        """Everything about the kernel is in; it will not be measured again in this store."""
        with self._write():
            number = self._kernel(kernel)
            self._db.execute(
                "INSERT OR REPLACE INTO finished VALUES (?, ?, ?, ?)", (run, number, self._config(default), seconds)
            )
            self._db.execute("DELETE FROM claim WHERE kernel=?", (number,))

    def release(self, kernel: Kernel) -> None:
        """Give a claim back without calling the kernel finished: it may be measured again."""
        with self._write():
            self._db.execute("DELETE FROM claim WHERE kernel=?", (self._kernel(kernel),))

    def _kernel(self, kernel: Kernel) -> int:
        return self._number(self._kernels, "kernel", "problem", kernel.problem.key, ("program", kernel.program))

    def _config(self, config: Config) -> int:
        return self._number(self._configs, "config", "key", config.key)

    def _number(self, cache: dict[str, int], table: str, column: str, key: str, *more: tuple[str, str]) -> int:
        """The row of `key`, made if it is not there. The cache is only filled from committed rows."""
        if key not in cache:
            found = self._db.execute(f"SELECT id FROM {table} WHERE {column}=?", (key,)).fetchone()
            if found is None:
                names = ", ".join([column, *(name for name, _ in more)])
                marks = ", ".join("?" for _ in range(1 + len(more)))
                values = (key, *(value for _, value in more))
                return int(self._db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values).lastrowid or 0)
            cache[key] = int(found[0])
        return cache[key]

    # Reading

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._sentence(error) from error

    def finished(self) -> set[str]:
        """The canonical texts of the problems that need no more measuring."""
        query = "SELECT DISTINCT problem FROM finished JOIN kernel ON kernel.id = finished.kernel"
        return {row[0] for row in self._all(query)}

    def finished_from(self, round_number: int) -> set[str]:
        """Those of them that a run finished in which rounds of this number or a higher one were taken."""
        query = """SELECT DISTINCT problem FROM finished JOIN kernel ON kernel.id = finished.kernel
            JOIN batch ON batch.kernel = finished.kernel AND batch.run = finished.run WHERE batch.round >= ?"""
        return {row[0] for row in self._all(query, (round_number,))}

    def counts(self) -> dict[str, int]:
        """kernels (finished), pairs with a timing, timings, batches and disturbed batches."""
        queries = {
            "kernels": "SELECT count(DISTINCT kernel) FROM finished",
            "pairs": "SELECT count(*) FROM (SELECT DISTINCT kernel, config FROM timing JOIN batch ON batch.id = batch)",
            "timings": "SELECT count(*) FROM timing",
            "batches": "SELECT count(*) FROM batch",
            "disturbed": "SELECT count(*) FROM batch WHERE disturbed = 1",
        }
        return {name: int(self._all(query)[0][0]) for name, query in queries.items()}

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """A consistent copy while others write."""
        target = sqlite3.connect(path)
        try:
            self._db.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            raise self._sentence(error) from error
        finally:
            target.close()

    def machines(self) -> list[Machine]:
        query = "SELECT kind, identity, details FROM machine ORDER BY id"
        return [Machine(str(kind), str(who), self._table(details)) for kind, who, details in self._all(query)]

    def runs(self) -> list[tuple[float, int, dict[str, Any]]]:
        """When each run started (seconds since 1970), its seed and its settings."""
        query = "SELECT started, seed, settings FROM run ORDER BY id"
        rows = self._all(query)
        if not all(self._is_time(started) and started < _LATEST and type(seed) is int for started, seed, _ in rows):
            raise self._damaged("a run without its time or seed")
        return [(started, seed, self._table(settings)) for started, seed, settings in rows]

    def verdicts(self, kernel: Kernel) -> list[tuple[Config, str, str]]:
        """What was said of each configuration, oldest first: configuration, status, reason."""
        query = """SELECT key, status, reason FROM verdict JOIN config ON config.id = verdict.config
            WHERE kernel = (SELECT id FROM kernel WHERE problem = ?) ORDER BY verdict.rowid"""
        rows = self._all(query, (kernel.problem.key,))
        if not all(isinstance(status, str) and isinstance(reason, str) for _, status, reason in rows):
            raise self._damaged("a verdict that is no text")
        return [(self._config_of(key), status, reason) for key, status, reason in rows]

    def default_config(self, kernel: Kernel) -> Config | None:
        """The default of a finished kernel."""
        query = """SELECT key FROM finished JOIN config ON config.id = default_config
            WHERE kernel = (SELECT id FROM kernel WHERE problem = ?) ORDER BY run DESC LIMIT 1"""
        rows = self._all(query, (kernel.problem.key,))
        return self._config_of(rows[0][0]) if rows else None

    def batches(self, kernel: Kernel) -> list[BatchRow]:
        """Every batch of a kernel in the order they were taken."""
        query = """SELECT batch.id, run, round, default_ns, disturbed, taken, key, runtime_ps FROM batch
            LEFT JOIN timing ON timing.batch = batch.id LEFT JOIN config ON config.id = timing.config
            WHERE kernel = (SELECT id FROM kernel WHERE problem = ?) ORDER BY batch.id"""
        found: dict[int, BatchRow] = {}
        for number, run, turn, default_ns, disturbed, taken, key, runtime_ps in self._all(query, (kernel.problem.key,)):
            whole = all(type(value) is int for value in (number, run, turn, disturbed)) and type(taken) in (int, float)
            if not (self._is_time(default_ns) and whole and (key is None or self._is_time(runtime_ps))):
                raise self._damaged("a time or a round that is none")
            batch = found.setdefault(
                number, BatchRow(run, default_ns, bool(disturbed), taken, {}, number, turn, disturbed == _OPEN)
            )
            if key is not None:
                batch.runtime_ns[self._config_of(key).key] = runtime_ps / 1000
        return list(found.values())

    def kernels(self) -> list[Kernel]:
        """Every kernel with at least one batch."""
        query = "SELECT program, problem FROM kernel WHERE id IN (SELECT kernel FROM batch) ORDER BY id"
        return [self._kernel_of(program, problem) for program, problem in self._all(query)]

    # What is read was written by whoever made the file: names become file names, numbers are divided by.

    def _damaged(self, why: str) -> FileFormatError:
        return FileFormatError(f"{self.path} is damaged, or was not written by tilewise: it holds {why}.")

    def _table(self, text: Any) -> dict[str, Any]:
        found = parse_json(text, f"A row of {self.path}") if isinstance(text, str) else None
        if not isinstance(found, dict):
            raise self._damaged("a row that is not a table")
        return found

    def _config_of(self, key: Any) -> Config:
        if not isinstance(key, str):
            raise self._damaged("a configuration that is no text")
        if key not in self._parsed:
            values = self._table(key)
            if not all(type(value) is int and abs(value) < _LARGEST for value in values.values()):
                raise self._damaged("a configuration that is not of whole numbers")
            self._parsed[key] = Config(values)
        return self._parsed[key]

    def _kernel_of(self, program: Any, problem: Any) -> Kernel:
        values = self._table(problem)
        if not isinstance(program, str) or not _PROGRAM.fullmatch(program):
            raise self._damaged("a program's name that cannot be a file's")
        if not isinstance(values.get("family"), str) or not all(
            type(value) is str or (type(value) is int and abs(value) < _LARGEST) for value in values.values()
        ):
            raise self._damaged("a problem that is none")
        return Kernel(program, Problem(values))

    @staticmethod
    def _is_time(value: Any) -> bool:
        return type(value) in (int, float) and 0 < value < _LONGEST


def _short(details: Mapping[str, Any] | None) -> str:
    return json.dumps(details, separators=(",", ":")) if details else ""


def _ps(runtime_ns: float) -> int:
    return round(runtime_ns * 1000)


def _process() -> tuple[str, int, str]:
    return os.uname().nodename, os.getpid(), _born(os.getpid())


def _born(process: int) -> str:
    """When a process started, in kernel ticks: a number that a later process with the same id does not share."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def _holds(host: str, process: int, born: str, taken: float) -> bool:
    """Whether a claim still counts: its process runs; one on another machine is believed for a quarter of an hour."""
    if host == os.uname().nodename:
        return born != "" and _born(process) == born
    return time.time() - taken < 900
