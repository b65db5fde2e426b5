"""What a measurement store is read with: whose measurements, kernels, verdicts and batches, each checked as it comes.

What is read was written by whoever made the file: names become file names, numbers are divided by.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewise._files import parse_json
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.store.home import Home, SqliteFile
from tilewise.store.problem import Config, Kernel, Problem

OPEN = 2  # in place of a batch's verdict, while there is none; older versions read it as disturbed
_LARGEST = 1 << 53  # whole numbers up to here are exact as floats
_LONGEST = 1e18  # nanoseconds or picoseconds that still fit into 64 bits
_LATEST = 253402300799.0  # the last second that a date can have
_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_OF_KERNEL = "(SELECT id FROM kernel WHERE problem = :problem AND part = :part)"


@dataclass(frozen=True)
class Machine:
    """Who measured. Measurements are mixed only between equal `identity`s (the GPU's name; the CPU's model)."""

    kind: str  # "triton" or "cpu"
    identity: str
    details: Mapping[str, Any]

    @property
    def part(self) -> str:
        """What a shared store calls the measurements of such machines."""
        return f"{self.kind} {self.identity}"


@dataclass(frozen=True)
class Verdict:
    """What became of a configuration: ok, misfit, wrong, failed or slow; and why."""

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


class Readable:
    """An open store, to read from. `part` chooses whose measurements, of a store that several machines share."""

    def __init__(self, home: Home, part: str | None = None) -> None:
        self.home, self.name = home, home.name
        self._part = part if home.shared else ""
        self._parsed: dict[str, Config] = {}

    # Parts

    @property
    def shared(self) -> bool:
        """Whether machines of several kinds measure into it."""
        return self.home.shared

    @property
    def part(self) -> str:
        """Whose measurements are read: a file's own, the part that was chosen, or the only one there is."""
        if self._part is None:
            found = self.parts()
            if len(found) > 1:
                raise ConfigurationError(
                    f"{self.name} holds measurements of {len(found)} kinds of machine; "
                    f"name one with --machine: {'; '.join(found)}."
                )
            self._part = found[0] if found else None
        return self._part or ""

    def parts(self) -> list[str]:
        """The kinds of machine that a shared store has measurements of."""
        rows = self.home.read("SELECT DISTINCT kind, identity FROM machine ORDER BY kind, identity")
        return [Machine(str(kind), str(identity), {}).part for kind, identity in rows]

    def choose_part(self, machine: Machine | str) -> None:
        """Read this machine's measurements. A file's are those it has."""
        if self.home.shared:
            self._part = machine if isinstance(machine, str) else machine.part

    def _of(self, kernel: Kernel) -> dict[str, str]:
        return {"problem": kernel.problem.key, "part": self.part}

    def finished(self) -> set[str]:
        """The canonical texts of the problems that need no more measuring."""
        query = """SELECT DISTINCT problem FROM finished JOIN kernel ON kernel.id = finished.kernel
            WHERE part = :part"""
        return {row[0] for row in self.home.read(query, {"part": self.part})}

    def finished_from(self, round_number: int) -> set[str]:
        """Those of them that a run finished in which rounds of this number or a higher one were taken."""
        query = """SELECT DISTINCT problem FROM finished JOIN kernel ON kernel.id = finished.kernel
            JOIN batch ON batch.kernel = finished.kernel AND batch.run = finished.run
            WHERE part = :part AND batch.round >= :round"""
        return {row[0] for row in self.home.read(query, {"part": self.part, "round": round_number})}

    def counts(self) -> dict[str, int]:
        """kernels (finished), pairs with a timing, timings, batches and disturbed batches."""
        kernel = "JOIN kernel ON kernel.id = {}.kernel WHERE part = :part"
        timing = f"FROM timing JOIN batch ON batch.id = timing.batch {kernel.format('batch')}"
        queries = {
            "kernels": f"SELECT count(DISTINCT finished.kernel) FROM finished {kernel.format('finished')}",
            "pairs": f"SELECT count(*) FROM (SELECT DISTINCT batch.kernel, timing.config {timing}) AS pairs",
            "timings": f"SELECT count(*) {timing}",
            "batches": f"SELECT count(*) FROM batch {kernel.format('batch')}",
            "disturbed": f"SELECT count(*) FROM batch {kernel.format('batch')} AND disturbed = 1",
        }
        values = {"part": self.part}
        return {name: int(self.home.read(query, values)[0][0]) for name, query in queries.items()}

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """A consistent copy of a file while others write."""
        if not isinstance(self.home, SqliteFile):
            raise ConfigurationError(f"{self.name} is no file; `tilewise store export` copies it into one.")
        self.home.copy(path)

    def machines(self) -> list[Machine]:
        query = "SELECT kind, identity, details FROM machine ORDER BY id"
        rows = self.home.read(query)
        found = [Machine(str(kind), str(who), self.table_of(details)) for kind, who, details in rows]
        return [machine for machine in found if not self.home.shared or machine.part == self.part]

    def runs(self) -> list[tuple[float, int, dict[str, Any]]]:
        """When each run started (seconds since 1970), its seed and its settings."""
        query = """SELECT started, seed, settings, kind, identity FROM run LEFT JOIN machine ON machine.id = run.machine
            ORDER BY run.id"""
        rows = self.home.read(query)
        if not all(self._is_time(started) and started < _LATEST and type(seed) is int for started, seed, *_ in rows):
            raise self._damaged("a run without its time or seed")
        own = [row for row in rows if not self.home.shared or Machine(row[3], row[4], {}).part == self.part]
        return [(started, seed, self.table_of(settings)) for started, seed, settings, *_ in own]

    def verdicts(self, kernel: Kernel) -> list[tuple[Config, str, str]]:
        """What was said of each configuration, oldest first: configuration, status, reason."""
        query = f"""SELECT key, status, reason FROM verdict JOIN config ON config.id = verdict.config
            WHERE verdict.kernel = {_OF_KERNEL} ORDER BY verdict.{self.home.order}"""
        rows = self.home.read(query, self._of(kernel))
        if not all(isinstance(status, str) and isinstance(reason, str) for _, status, reason in rows):
            raise self._damaged("a verdict that is no text")
        return [(self.config_of(key), status, reason) for key, status, reason in rows]

    def default_config(self, kernel: Kernel) -> Config | None:
        """The default of a finished kernel."""
        query = f"""SELECT key FROM finished JOIN config ON config.id = finished.default_config
            WHERE finished.kernel = {_OF_KERNEL} ORDER BY run DESC LIMIT 1"""
        rows = self.home.read(query, self._of(kernel))
        return self.config_of(rows[0][0]) if rows else None

    def batches(self, kernel: Kernel) -> list[BatchRow]:
        """Every batch of a kernel in the order they were taken."""
        query = f"""SELECT batch.id, run, round, default_ns, disturbed, taken, key, runtime_ps FROM batch
            LEFT JOIN timing ON timing.batch = batch.id LEFT JOIN config ON config.id = timing.config
            WHERE batch.kernel = {_OF_KERNEL} ORDER BY batch.id"""
        found: dict[int, BatchRow] = {}
        for number, run, turn, default_ns, disturbed, taken, key, runtime_ps in self.home.read(query, self._of(kernel)):
            whole = all(type(value) is int for value in (number, run, turn, disturbed)) and type(taken) in (int, float)
            if not (self._is_time(default_ns) and whole and (key is None or self._is_time(runtime_ps))):
                raise self._damaged("a time or a round that is none")
            batch = found.setdefault(
                number, BatchRow(run, default_ns, bool(disturbed), taken, {}, number, turn, disturbed == OPEN)
            )
            if key is not None:
                batch.runtime_ns[self.config_of(key).key] = runtime_ps / 1000
        return list(found.values())

    def has_kernel(self, kernel: Kernel) -> bool:
        """Whether anything was ever said of a kernel."""
        return bool(self.home.read(f"SELECT 1 WHERE EXISTS {_OF_KERNEL}", self._of(kernel)))

    def kernels(self) -> list[Kernel]:
        """Every kernel with at least one batch."""
        query = """SELECT program, problem FROM kernel
            WHERE part = :part AND id IN (SELECT kernel FROM batch) ORDER BY id"""
        rows = self.home.read(query, {"part": self.part})
        return [self.kernel_of(program, problem) for program, problem in rows]

    def _damaged(self, why: str) -> FileFormatError:
        return FileFormatError(f"{self.name} is damaged, or was not written by tilewise: it holds {why}.")

    def table_of(self, text: Any) -> dict[str, Any]:
        found = parse_json(text, f"A row of {self.name}") if isinstance(text, str) else None
        if not isinstance(found, dict):
            raise self._damaged("a row that is not a table")
        return found

    def config_of(self, key: Any) -> Config:
        if not isinstance(key, str):
            raise self._damaged("a configuration that is no text")
        if key not in self._parsed:
            values = self.table_of(key)
            if not all(type(value) is int and abs(value) < _LARGEST for value in values.values()):
                raise self._damaged("a configuration that is not of whole numbers")
            self._parsed[key] = Config(values)
        return self._parsed[key]

    def kernel_of(self, program: Any, problem: Any) -> Kernel:
        values = self.table_of(problem)
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
