"""Records on their way to kernels.

A log may name its kernels in any order and be larger than memory, so records wait in a database of their own, in a
temporary folder, until all are there.
"""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tilewise.costmodel.data.importers.record import Record, Value
from tilewise.errors import UnavailableError

MAX_KERNELS = 1_000_000
_REMEMBERED = 200_000
_AT_ONCE = 2000
_TABLES = """
CREATE TABLE kernels (number INTEGER PRIMARY KEY, text TEXT UNIQUE);
CREATE TABLE configs (number INTEGER PRIMARY KEY, text TEXT UNIQUE);
CREATE TABLE runs (kernel INTEGER, config INTEGER, ns REAL, is_default INTEGER);
"""


class Timed(NamedTuple):
    """A configuration and what is kept of its repeats: a kernel may have a million, so nothing else stays in memory."""

    number: int
    median_ns: float
    deviation: float  # relative standard deviation; NaN for a single repeat
    repeats: int  # none where it failed
    is_default: bool


def _timed(number: int, times: list[float], is_default: bool) -> Timed:
    if not times:
        return Timed(number, math.nan, math.nan, 0, is_default)
    times.sort()
    count, mean = len(times), math.fsum(times) / len(times)
    median = (times[(count - 1) // 2] + times[count // 2]) / 2
    spread = math.sqrt(math.fsum((ns - mean) ** 2 for ns in times) / (count - 1)) / mean if count > 1 else math.nan
    return Timed(number, median, spread, count, is_default)


@dataclass(frozen=True)
class Spooled:
    """One kernel: who it is, and by configuration its runtimes, of which a failed one has none."""

    identity: Mapping[str, Any]  # device, kernel, sizes
    configs: list[Timed]


class Spool:
    """Takes records in any order, gives them back by kernel. A context: the folder goes when the block ends."""

    def __enter__(self) -> Spool:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="tilewise-import-")
            self._database = sqlite3.connect(Path(self._folder.name) / "records.sqlite")
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(f"Records cannot be kept in a temporary folder ({error}).") from error
        # It need not survive anything: without a journal, and without waiting for the disk.
        self._database.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _TABLES)
        self._rows: list[tuple[int, int, float | None, bool]] = []
        self._numbers: dict[str, dict[str, int]] = {"kernels": {}, "configs": {}}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
        self._folder.cleanup()

    def add(self, record: Record) -> None:
        kernel = self._number(
            "kernels", {"device": record.device, "kernel": record.kernel, "sizes": dict(record.sizes)}
        )
        config = self._number("configs", dict(record.config))
        times: tuple[float | None, ...] = record.runtimes_ns or (None,)
        self._rows += [(kernel, config, ns, record.is_default) for ns in times]
        if len(self._rows) >= _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        try:
            self._database.executemany("INSERT INTO runs VALUES (?, ?, ?, ?)", self._rows)
        except sqlite3.Error as error:
            raise UnavailableError(f"Records cannot be kept in a temporary folder ({error}).") from error
        self._rows = []

    def _number(self, table: str, value: Mapping[str, Any]) -> int:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        known = self._numbers[table]
        if (number := known.get(text)) is not None:
            return number
        self._database.execute(f"INSERT OR IGNORE INTO {table} (text) VALUES (?)", (text,))
        number = int(self._database.execute(f"SELECT number FROM {table} WHERE text = ?", (text,)).fetchone()[0])
        if len(known) >= _REMEMBERED:
            known.clear()
        known[text] = number
        return number

    def configurations(self) -> Iterator[tuple[int, dict[str, Value]]]:
        """Every configuration that occurs, with its number."""
        for number, text in self._database.execute("SELECT number, text FROM configs ORDER BY number"):
            yield number, json.loads(text)

    def configuration(self, number: int) -> dict[str, Value]:
        text = self._database.execute("SELECT text FROM configs WHERE number = ?", (number,)).fetchone()[0]
        values: dict[str, Value] = json.loads(text)
        return values

    def identities(self) -> Iterator[Mapping[str, Any]]:
        """Who the kernels are."""
        for (text,) in self._database.execute("SELECT text FROM kernels ORDER BY number"):
            yield json.loads(text)

    def kernels(self) -> Iterator[Spooled]:
        """The kernels one after the other."""
        self._flush()
        self._database.execute("CREATE INDEX by_kernel ON runs (kernel, config)")
        rows = self._database.execute("SELECT kernel, config, ns, is_default FROM runs ORDER BY kernel, config, rowid")
        for kernel, of_kernel in itertools.groupby(rows, key=lambda row: row[0]):
            text = self._database.execute("SELECT text FROM kernels WHERE number = ?", (kernel,)).fetchone()[0]
            configs = []
            for config, of_config in itertools.groupby(of_kernel, key=lambda row: row[1]):
                taken = list(of_config)
                times = [row[2] for row in taken if row[2] is not None]
                configs.append(_timed(config, times, any(row[3] for row in taken)))
            yield Spooled(json.loads(text), configs)
