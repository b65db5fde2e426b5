"""What was decided and measured for PyTorch's compiler: one line of JSON each, appended; and the report over them.

Measurements also go to the tuner's memory of choices, so that the next process keeps the winner without measuring.
A file that cannot be written costs the record, never the compilation.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._files import open_input, reading
from tilewise._system import cache_folder
from tilewise.errors import MissingFileError, TilewiseError
from tilewise.inductor.templates import config_of, problem_of
from tilewise.tune.choose.cache import Choice, Choices
from tilewise.tune.problem import Config, Problem

_MOST_BYTES = 256 << 20
_FILE = "records.jsonl"


def folder() -> Path:
    """Where records and choices lie: ``$TILEWISE_CACHE/inductor``, else the user's cache folder's."""
    return cache_folder() / "inductor"


@dataclass(frozen=True)
class Record:
    """One product that PyTorch measured: its configurations and their seconds."""

    problem: Problem
    configs: tuple[Config, ...]
    seconds: tuple[float, ...]

    @property
    def batch(self) -> int:
        return self.problem.size("batch")


class Book:
    """The records of one machine: written as they come, and what was the fastest before."""

    def __init__(self, machine: str, where: Path | None = None) -> None:
        self.where = where or folder()
        self.choices = Choices(self.where, machine, "inductor")

    def best(self, problem: Problem) -> Config | None:
        found = self.choices.get(problem)
        return found.config if found is not None else None

    def decided(self, problem: Problem, why: str, considered: int, kept: int, seconds: float) -> None:
        self._write({"what": "decided", "problem": dict(problem), "why": why, "considered": considered, "kept": kept,
                     "seconds": seconds})  # fmt: skip

    def measured(self, problem: Problem, rows: Sequence[tuple[Config, float]], compile_seconds: float) -> None:
        """Keep what the compiler measured; the fastest is what the next process takes."""
        if not rows:
            return
        best, seconds = min(rows, key=lambda row: row[1])
        self._write({"what": "measured", "problem": dict(problem), "compile_seconds": compile_seconds,
                     "rows": [[dict(config), taken] for config, taken in rows]})  # fmt: skip
        try:
            self.choices.put(Choice(problem, best, seconds * 1e9, len(rows), True))
        except TilewiseError:
            return

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self.where.mkdir(parents=True, exist_ok=True)
            with (self.where / _FILE).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**line, "taken": round(time.time(), 3)}) + "\n")
        except OSError:
            return


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that mean something."""
    with open_input(path, _MOST_BYTES) as stream, reading(path):
        content = stream.read(_MOST_BYTES)
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """What PyTorch measured, from a file of `tools.visit_inductor` or of this module."""
    found = []
    for line in read_lines(Path(path)):
        record = _from_visit(line) if "nodes" in line else _from_book(line) if line.get("what") == "measured" else None
        if record is not None and record.configs:
            found.append(record)
    return found


def _from_visit(line: Mapping[str, Any]) -> Record | None:
    left, right = line["nodes"][-2:]
    problem = problem_of(line["op"], (left[0], left[1]), (right[0], right[1]), left[2])
    if problem is None:
        return None
    rows: dict[Config, float] = {}
    for template, _, parameters, milliseconds, *_ in line["rows"]:
        config = config_of(template, parameters)
        if config is not None and milliseconds is not None and 0 < milliseconds < 1e4:
            rows[config] = min(milliseconds * 1e-3, rows.get(config, 1e9))
    return Record(problem, tuple(rows), tuple(rows.values()))


def _from_book(line: Mapping[str, Any]) -> Record | None:
    try:
        rows = {Config(config): float(seconds) for config, seconds in line["rows"]}
        return Record(Problem(line["problem"]), tuple(rows), tuple(rows.values()))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


@dataclass(frozen=True)
class Row:
    """One product that the compiler asked about."""

    product: str
    why: str
    considered: int
    kept: int
    fastest: str  # empty where nothing was measured
    of_aten: float  # ATen's time over the fastest's


@dataclass(frozen=True)
class Summary:
    """What tilewise did for PyTorch's compiler on this machine."""

    products: int
    considered: int
    kept: int
    measured: int
    remembered: int
    choosing_seconds: float
    rows: tuple[Row, ...]


def summary(where: Path | None = None) -> Summary:
    """The report over all records."""
    if where is not None and not where.is_dir():
        raise MissingFileError(f"{where} is no folder of records.")
    path = (where or folder()) / _FILE
    lines = list(read_lines(path)) if path.is_file() else []
    decided = [line for line in lines if line.get("what") == "decided"]
    fastest = {}
    for line in lines:
        record = _from_book(line) if line.get("what") == "measured" else None
        if record is not None and record.configs:
            place = min(range(len(record.seconds)), key=record.seconds.__getitem__)
            library = [s for c, s in zip(record.configs, record.seconds, strict=True) if "library" in c]
            ratio = min(library) / record.seconds[place] if library else 1.0
            fastest[record.problem.key] = (_short(record.configs[place]), ratio)
    rows = []
    for line in decided:
        problem = Problem(line["problem"])
        name, ratio = fastest.get(problem.key, ("ATen" if line["why"] == "sure" else "", 1.0))
        rows.append(Row(_name(problem), str(line["why"]), int(line["considered"]), int(line["kept"]), name, ratio))
    return Summary(
        products=len(decided),
        considered=sum(int(line["considered"]) for line in decided),
        kept=sum(int(line["kept"]) for line in decided),
        measured=sum(line["why"] == "measured" for line in decided),
        remembered=sum(line["why"] == "remembered" for line in decided),
        choosing_seconds=sum(float(line["seconds"]) for line in decided),
        rows=tuple(rows),
    )


def _name(problem: Problem) -> str:
    batch = f"{problem.size('batch')} x " if problem.size("batch") > 1 else ""
    sizes = " x ".join(str(problem.size(name)) for name in ("m", "n", "k"))
    return f"{problem.word('op')} {batch}{sizes} {problem.word('dtype')}"


def _short(config: Config) -> str:
    if "library" in config:
        return "ATen"
    tile = "x".join(str(config.size(name)) for name in ("block_m", "block_n", "block_k"))
    return f"{tile}, {config.size('warps')} warps, {config.size('stages')} stages" + ", TMA" * config.size("tma")
