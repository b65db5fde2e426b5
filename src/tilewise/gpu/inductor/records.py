"""What was decided for PyTorch's compiler, a line of JSON each; what it measured, in a measurement store; the report.

Measurements also go to the tuner's memory of choices, so that the next process keeps the winner without measuring.
What cannot be written costs the record, never the compilation.
"""

from __future__ import annotations

import hashlib
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
from tilewise.gpu.products.family import LIBRARY
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.cache import Choices, Decision

_MOST_BYTES = 256 << 20
_FILE = "decisions.jsonl"
_PROGRAM = "inductor"


def folder() -> Path:
    """Where records and choices lie: ``$TILEWISE_CACHE/inductor``, else the user's cache folder's."""
    return cache_folder() / "inductor"


class Book:
    """The records of one machine: written as they come, and what was the fastest before."""

    def __init__(self, machine: str, where: Path | None = None) -> None:
        self.where, self.machine = where or folder(), machine
        self.choices = Choices(self.where, machine, "inductor")

    @property
    def store_file(self) -> Path:
        """Every measurement that the compiler made on this machine with this version."""
        return self.where / f"triton-{hashlib.sha256(self.machine.encode()).hexdigest()[:12]}.sqlite"

    def best(self, problem: Problem) -> Config | None:
        found = self.choices.get(problem)
        return found.config if found is not None else None

    def decided(self, problem: Problem, why: str, considered: int, kept: int, seconds: float) -> None:
        line = {"problem": dict(problem), "why": why, "considered": considered, "kept": kept, "seconds": seconds}
        try:
            self.where.mkdir(parents=True, exist_ok=True)
            with (self.where / _FILE).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**line, "taken": round(time.time(), 3)}) + "\n")
        except OSError:
            return

    def measured(self, problem: Problem, rows: Sequence[tuple[Config, float]], compile_seconds: float) -> None:
        """Keep what the compiler measured, in seconds; the fastest is what the next process takes."""
        if not rows:
            return
        times = {config: seconds * 1e9 for config, seconds in rows}
        best = min(times, key=times.__getitem__)
        try:
            with Store(self.store_file) as store:
                run = store.begin(Machine("triton", self.machine, {}), 0, {"compile_seconds": compile_seconds})
                default_ns = times.get(LIBRARY, times[best])
                store.add_batch(run, Kernel(_PROGRAM, problem), 0, default_ns, list(times.items()))
            self.choices.put(Decision(problem, best, "measured", times[best], None, len(rows), True))
        except (TilewiseError, OSError):
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


def fastest(where: Path) -> dict[str, tuple[Config, float]]:
    """Of every product in a folder's stores: the fastest as it was measured last, and ATen's time over its own."""
    found = {}
    for path in sorted(where.glob("*.sqlite")):
        with Store(path, create=False) as store:
            for kernel in store.kernels():
                batches = store.batches(kernel)
                times = {Config.parse(key): ns for key, ns in batches[-1].runtime_ns.items()} if batches else {}
                if times:
                    best = min(times, key=times.__getitem__)
                    aten = min((ns for config, ns in times.items() if "library" in config), default=times[best])
                    found[kernel.problem.key] = (best, aten / times[best])
    return found


@dataclass(frozen=True)
class Row:
    """One product that the compiler asked about."""

    product: str
    why: str
    considered: int
    kept: int
    fastest: str  # empty where nothing was measured
    of_aten: float  # ATen's time over the fastest's
    seconds: float  # of choosing


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
    where = where or folder()
    path = where / _FILE
    lines, known = list(read_lines(path)) if os.path.lexists(path) else [], fastest(where)
    rows = [row for line in lines if (row := _row(line, known)) is not None]
    return Summary(
        products=len(rows),
        considered=sum(row.considered for row in rows),
        kept=sum(row.kept for row in rows),
        measured=sum(row.why == "measured" for row in rows),
        remembered=sum(row.why == "remembered" for row in rows),
        choosing_seconds=sum(row.seconds for row in rows),
        rows=tuple(rows),
    )


def _row(line: Mapping[str, Any], known: Mapping[str, tuple[Config, float]]) -> Row | None:
    """What was decided of one product; None for a line that means something else."""
    try:
        problem, why = Problem(line["problem"]), str(line["why"])
        atens = why == "sure" and problem.family != "attention"  # of which it has no call
        config, ratio = known.get(problem.key, (LIBRARY if atens else None, 1.0))
        considered, kept, seconds = int(line["considered"]), int(line["kept"]), float(line["seconds"])
        name = _short(config) if config is not None else ""
        return Row(_name(problem), why, considered, kept, name, ratio, seconds)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _name(problem: Problem) -> str:
    if problem.family == "attention":
        sizes = " x ".join(str(problem.size(name)) for name in ("batch", "heads", "queries", "keys", "head"))
        return f"attention {sizes} {problem.word('dtype')}"
    batch = f"{problem.size('batch')} x " if problem.size("batch") > 1 else ""
    sizes = " x ".join(str(problem.size(name)) for name in ("m", "n", "k"))
    return f"{problem.word('op')} {batch}{sizes} {problem.word('dtype')}"


def _short(config: Config) -> str:
    if "library" in config:
        return "ATen"
    tile = "x".join(str(config.size(name)) for name in ("block_m", "block_n", "block_k"))
    return f"{tile}, {config.size('warps')} warps, {config.size('stages')} stages" + ", TMA" * config.size("tma")
