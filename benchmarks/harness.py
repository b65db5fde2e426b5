"""What the benchmarks share: functions take turns, medians are compared, and the table is also written as JSON.

Peers run in the same process, at the same number of threads, in the same minutes. A ratio is the faster peer's time
over ours: above 1, tilewise is faster.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewise._extension import native
from tilewise._files import write_whole

Run = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One line of a table: a case, its threads, the median seconds of each contender, and the ratio."""

    name: str
    threads: int
    seconds: dict[str, float]
    ratio: float

    def __str__(self) -> str:
        times = "  ".join(f"{who} {seconds * 1e6:10.1f}" for who, seconds in self.seconds.items())
        return f"{self.name:34s} threads {self.threads}: {times} µs  {self.ratio:6.2f}×"


def compare(name: str, threads: int, runs: dict[str, Run], budget_s: float = 1.0) -> Row:
    """Time `runs` (ours is "tilewise") against each other for about `budget_s` seconds, and print the row."""
    seconds = interleaved(runs, threads, budget_s)
    peers = [value for who, value in seconds.items() if who != "tilewise"]
    row = Row(name, threads, seconds, min(peers) / seconds["tilewise"])
    print(row, flush=True)
    return row


def interleaved(runs: dict[str, Run], threads: int, budget_s: float) -> dict[str, float]:
    """Median seconds of one call of each, the contenders taking turns of about a millisecond."""
    repeats, times = _repeats(runs), {who: list[float]() for who in runs}
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or min(map(len, times.values())) < 7:
        for who, run in runs.items():
            _settle(threads)
            _warm_up(run, threads)
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[who].append((time.perf_counter() - start) / repeats)
    return {who: statistics.median(values) for who, values in times.items()}


def _settle(threads: int) -> None:
    """Idle threads of one contender keep a core busy (OpenMP's for 8 ms, ONNX Runtime's for 32) that the next needs."""
    if threads > 1:
        time.sleep(0.05)


def _warm_up(run: Run, threads: int) -> None:
    """Each contender's threads are asleep by then: let it wake its own before its turn is timed."""
    ready = time.perf_counter() + (0.002 if threads > 1 else 0.0)
    run()
    while time.perf_counter() < ready:
        run()


def _repeats(runs: dict[str, Run]) -> int:
    """How many calls of the quickest contender make a millisecond; also the warm-up."""
    quickest = float("inf")
    for run in runs.values():
        for _ in range(3):
            start = time.perf_counter()
            run()
            quickest = min(quickest, time.perf_counter() - start)
    return max(1, int(1e-3 / quickest))


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """The rows and the machine they were measured on, as JSON."""
    text = json.dumps({"date": today(), "machine": machine_class(), "rows": [asdict(row) for row in rows]}, indent=1)
    write_whole(path, text + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; none where there is no such file."""
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.is_file() else []


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine_class() -> dict[str, Any]:
    """What kind of machine this is, without saying which one."""
    isa = native.isa() if native is not None else "none"
    return {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "kernels": isa}
