"""Reads a measurement store: machines, runs, kernels, verdicts and batches.

A store is untrusted input. Every value is checked when it is read, because names become file names and times become
divisors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewise._files import parse_json
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.store.database import Database, SqliteDatabase
from tilewise.store.problem import Config, Kernel, Machine, Problem

OPEN = 2  # value of `disturbed` in an open batch; older versions read it as disturbed
_MAX_INTEGER = 1 << 53  # integers up to here are exact as float64
_MAX_TIME = 1e18  # nanoseconds or picoseconds that fit into 64 bits
_MAX_TIMESTAMP = 253402300799.0  # the end of the year 9999, the last of Python's dates
_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_KERNEL_NUMBER = "(SELECT id FROM kernel WHERE problem = :problem AND part = :part)"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a configuration (ok, misfit, wrong, failed or slow) and the reason for it."""

    config: Config
    status: str
    reason: str = ""
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class BatchRow:
    """One batch: the default's time, and the times of other configurations by their canonical text."""

    run: int
    default_ns: float
    disturbed: bool
    timestamp: float  # seconds since 1970
    runtime_ns: dict[str, float]
    number: int = 0
    round: int = 0
    open: bool = False  # not closed yet; an open batch counts as disturbed


class StoreReader:
    """An open store for reading; `partition` selects the kind of machine in a shared store."""

    def __init__(self, database: Database, partition: str | None = None) -> None:
        self.database, self.name = database, database.name
        self._partition = partition if database.shared else ""
        self._configs_by_key: dict[str, Config] = {}

    @property
    def shared(self) -> bool:
        """Whether machines of several kinds share the store (a PostgreSQL database)."""
        return self.database.shared

    @property
    def partition(self) -> str:
        """Name of the partition that is read, the selected or the only one; "" in a file."""
        if self._partition is None:
            partitions = self.partitions()
            if len(partitions) > 1:
                raise ConfigurationError(
                    f"{self.name} has measurements of {len(partitions)} kinds of machine; "
                    f"name one with --machine: {'; '.join(partitions)}."
                )
            self._partition = partitions[0] if partitions else None
        return self._partition or ""

    def partitions(self) -> list[str]:
        """List the partitions (kinds of machine) that have measurements."""
        rows = self.database.read("SELECT DISTINCT kind, identity FROM machine ORDER BY kind, identity")
        return [Machine(str(kind), str(identity), {}).partition for kind, identity in rows]

    def choose_partition(self, machine: Machine | str) -> None:
        """Read the measurements of this kind of machine from now on; no effect in a file."""
        if self.database.shared:
            self._partition = machine if isinstance(machine, str) else machine.partition

    def _kernel_values(self, kernel: Kernel) -> dict[str, str]:
        """Return the SQL parameters that select a kernel in `_KERNEL_NUMBER`."""
        return {"problem": kernel.problem.key, "part": self.partition}

    def finished(self) -> set[str]:
        """Return the problems whose measurement is finished, as canonical JSON."""
        query = """SELECT DISTINCT problem FROM finished JOIN kernel ON kernel.id = finished.kernel
            WHERE part = :part"""
        return {row[0] for row in self.database.read(query, {"part": self.partition})}

    def finished_from(self, round_number: int) -> set[str]:
        """Return the finished problems whose finishing run has a batch of round `round_number` or a later one."""
        query = """SELECT DISTINCT problem FROM finished JOIN kernel ON kernel.id = finished.kernel
            JOIN batch ON batch.kernel = finished.kernel AND batch.run = finished.run
            WHERE part = :part AND batch.round >= :round"""
        return {row[0] for row in self.database.read(query, {"part": self.partition, "round": round_number})}

    def counts(self) -> dict[str, int]:
        """Count kernels finished, configurations with timings, timings, batches, and disturbed batches."""
        kernel = "JOIN kernel ON kernel.id = {}.kernel WHERE part = :part"
        timing = f"FROM timing JOIN batch ON batch.id = timing.batch {kernel.format('batch')}"
        queries = {
            "kernels": f"SELECT count(DISTINCT finished.kernel) FROM finished {kernel.format('finished')}",
            "pairs": f"SELECT count(*) FROM (SELECT DISTINCT batch.kernel, timing.config {timing}) AS pairs",
            "timings": f"SELECT count(*) {timing}",
            "batches": f"SELECT count(*) FROM batch {kernel.format('batch')}",
            "disturbed": f"SELECT count(*) FROM batch {kernel.format('batch')} AND disturbed = 1",
        }
        values = {"part": self.partition}
        return {name: int(self.database.read(query, values)[0][0]) for name, query in queries.items()}

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a consistent copy of the store to `path`, while other processes may write to it."""
        if not isinstance(self.database, SqliteDatabase):
            raise ConfigurationError(f"{self.name} is not a file; `tilewise store export` copies it to one.")
        self.database.copy(path)

    def machines(self) -> list[Machine]:
        """List the machines that measured, oldest first."""
        query = "SELECT kind, identity, details FROM machine ORDER BY id"
        rows = self.database.read(query)
        machines = [Machine(str(kind), str(identity), self.table_of(details)) for kind, identity, details in rows]
        return [machine for machine in machines if not self.database.shared or machine.partition == self.partition]

    def runs(self) -> list[tuple[float, int, dict[str, Any]]]:
        """Return start time (seconds since 1970), seed and settings of each run."""
        query = """SELECT started, seed, settings, kind, identity FROM run LEFT JOIN machine ON machine.id = run.machine
            ORDER BY run.id"""
        rows = self.database.read(query)
        if not all(
            self._is_time(started) and started < _MAX_TIMESTAMP and type(seed) is int for started, seed, *_ in rows
        ):
            raise self.damage_error("a run without its time or seed")
        if self.database.shared:
            rows = [row for row in rows if Machine(row[3], row[4], {}).partition == self.partition]
        return [(started, seed, self.table_of(settings)) for started, seed, settings, *_ in rows]

    def verdicts(self, kernel: Kernel) -> list[tuple[Config, str, str]]:
        """Return configuration, status and reason of each verdict about a kernel, oldest first."""
        query = f"""SELECT key, status, reason FROM verdict JOIN config ON config.id = verdict.config
            WHERE verdict.kernel = {_KERNEL_NUMBER} ORDER BY verdict.{self.database.row_order_sql}"""
        rows = self.database.read(query, self._kernel_values(kernel))
        if not all(isinstance(status, str) and isinstance(reason, str) for _, status, reason in rows):
            raise self.damage_error("a verdict that is not a text")
        return [(self.config_of(key), status, reason) for key, status, reason in rows]

    def default_config(self, kernel: Kernel) -> Config | None:
        """Return the default configuration of a kernel if it is finished, else None."""
        query = f"""SELECT key FROM finished JOIN config ON config.id = finished.default_config
            WHERE finished.kernel = {_KERNEL_NUMBER} ORDER BY run DESC LIMIT 1"""
        rows = self.database.read(query, self._kernel_values(kernel))
        return self.config_of(rows[0][0]) if rows else None

    def batches(self, kernel: Kernel) -> list[BatchRow]:
        """Return every batch of a kernel, oldest first."""
        query = f"""SELECT batch.id, run, round, default_ns, disturbed, taken, key, runtime_ps FROM batch
            LEFT JOIN timing ON timing.batch = batch.id LEFT JOIN config ON config.id = timing.config
            WHERE batch.kernel = {_KERNEL_NUMBER} ORDER BY batch.id"""
        batches: dict[int, BatchRow] = {}
        # One row per timing; a batch without timings has one row whose key is NULL.
        for row in self.database.read(query, self._kernel_values(kernel)):
            number, run, round_number, default_ns, disturbed, timestamp, key, runtime_ps = row
            integers_valid = all(type(value) is int for value in (number, run, round_number, disturbed))
            times_valid = self._is_time(default_ns) and type(timestamp) in (int, float)
            if not (integers_valid and times_valid and (key is None or self._is_time(runtime_ps))):
                raise self.damage_error("an impossible time or round")
            if number not in batches:
                is_open = disturbed == OPEN
                batches[number] = BatchRow(
                    run, default_ns, bool(disturbed), timestamp, {}, number=number, round=round_number, open=is_open
                )
            if key is not None:
                batches[number].runtime_ns[self.config_of(key).key] = runtime_ps / 1000
        return list(batches.values())

    def has_kernel(self, kernel: Kernel) -> bool:
        """Tell whether the store contains a kernel, measured or queued."""
        return bool(self.database.read(f"SELECT 1 WHERE EXISTS {_KERNEL_NUMBER}", self._kernel_values(kernel)))

    def kernels(self) -> list[Kernel]:
        """List the kernels with at least one batch."""
        query = """SELECT program, problem FROM kernel
            WHERE part = :part AND id IN (SELECT kernel FROM batch) ORDER BY id"""
        rows = self.database.read(query, {"part": self.partition})
        return [self.kernel_of(program, problem) for program, problem in rows]

    def damage_error(self, content: str) -> FileFormatError:
        """Return the error for a store in which `content` is invalid."""
        return FileFormatError(f"{self.name} is damaged, or was not written by tilewise: it contains {content}.")

    def table_of(self, text: Any) -> dict[str, Any]:
        """Parse a JSON object in a row; raise `FileFormatError` if it is invalid."""
        table = parse_json(text, f"A row of {self.name}") if isinstance(text, str) else None
        if not isinstance(table, dict):
            raise self.damage_error("a row that is not a table")
        return table

    def config_of(self, key: Any) -> Config:
        """Parse a configuration's canonical JSON; cached. FileFormatError if it is invalid."""
        if not isinstance(key, str):
            raise self.damage_error("a configuration that is not a text")
        if key not in self._configs_by_key:
            values = self.table_of(key)
            if not all(type(value) is int and abs(value) < _MAX_INTEGER for value in values.values()):
                raise self.damage_error("a configuration with values that are not integers")
            self._configs_by_key[key] = Config(values)
        return self._configs_by_key[key]

    def kernel_of(self, program: Any, problem: Any) -> Kernel:
        """Build a kernel from its row's program and problem; FileFormatError if they are invalid."""
        values = self.table_of(problem)
        if not isinstance(program, str) or not _PROGRAM.fullmatch(program):
            raise self.damage_error("a program's name that cannot be part of a file name")
        if not isinstance(values.get("family"), str) or not all(
            type(value) is str or (type(value) is int and abs(value) < _MAX_INTEGER) for value in values.values()
        ):
            raise self.damage_error("an impossible problem")
        return Kernel(program, Problem(values))

    @staticmethod
    def _is_time(value: Any) -> bool:
        return type(value) in (int, float) and 0 < value < _MAX_TIME
