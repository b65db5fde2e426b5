"""From the timings in a store to one runtime a configuration.

A configuration's runtime comes from its undisturbed timings (from all of them, where fewer than two were
undisturbed): on a GPU it is their median, on a CPU the mean of the faster half, since what else goes on there only ever
slows down. A kernel that was interrupted has batches of several runs: each run's times are scaled by what the default
took in it, so that a slower hour does not look like a slower tile. Left out are configurations with a single timing and
those that any run found wrong.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import sqlite3
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.errors import FileFormatError
from tilewise.tune.problem import Config, Kernel
from tilewise.tune.store import BatchRow, Store

Middle = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Timing:
    """One configuration: its runtime, and the scatter of its repeats (relative standard deviation)."""

    config: Config
    runtime_ns: float
    deviation: float
    repeats: int


@dataclass(frozen=True)
class MeasuredProblem:
    """A finished kernel: the default's runtime and every configuration's, the default among them."""

    kernel: Kernel
    default: Config
    default_ns: float
    timings: tuple[Timing, ...]


def read_measured(store: Store) -> list[MeasuredProblem]:
    """Every finished kernel of a store."""
    found = []
    done = store.finished()
    for kernel in store.kernels():
        if kernel.problem.key in done:
            default = store.default_config(kernel)
            measured = measured_problem(store, kernel, default) if default is not None else None
            if measured is not None:
                found.append(measured)
    return found


def measured_problem(store: Store, kernel: Kernel, default: Config) -> MeasuredProblem | None:
    """What a store says of one kernel, finished or not; None where it holds no two configurations, or no default."""
    batches = store.batches(kernel)
    if not batches:
        return None
    refused = {config.key for config, status, _ in store.verdicts(kernel) if status != "ok"}
    middle = _faster_half if store.machines()[-1].kind == "cpu" else statistics.median
    factor, default_ns = _scales(batches, middle)
    clean: dict[str, list[float]] = defaultdict(list)
    every: dict[str, list[float]] = defaultdict(list)
    for batch in batches:
        for key, runtime_ns in ((default.key, batch.default_ns), *batch.runtime_ns.items()):
            every[key].append(runtime_ns * factor[batch.run])
            if not batch.disturbed:
                clean[key].append(runtime_ns * factor[batch.run])
    chosen = {key: clean[key] if len(clean[key]) > 1 else times for key, times in every.items() if key not in refused}
    timings = tuple(_timing(Config.parse(key), times, middle) for key, times in chosen.items() if len(times) > 1)
    if default not in {timing.config for timing in timings} or len(timings) < 2:
        return None
    return MeasuredProblem(kernel, default, default_ns, timings)


def _faster_half(times: Sequence[float]) -> float:
    """The mean of the faster half, the middle one included."""
    return statistics.fmean(sorted(times)[: (len(times) + 1) // 2])


def _scales(batches: Sequence[BatchRow], middle: Middle) -> tuple[dict[int, float], float]:
    """By run, what its times are multiplied by; and the default's runtime in the last run, which all are brought to."""
    clean: dict[int, list[float]] = defaultdict(list)
    every: dict[int, list[float]] = defaultdict(list)
    for batch in batches:
        every[batch.run].append(batch.default_ns)
        if not batch.disturbed:
            clean[batch.run].append(batch.default_ns)
    usual = {run: middle(clean.get(run) or times) for run, times in every.items()}
    last = usual[batches[-1].run]
    return {run: last / default_ns for run, default_ns in usual.items()}, last


def _timing(config: Config, times: Sequence[float], middle: Middle) -> Timing:
    return Timing(config, middle(times), statistics.stdev(times) / statistics.median(times), len(times))


@contextlib.contextmanager
def open_measurements(path: str | os.PathLike[str]) -> Iterator[Store]:
    """An existing store: the file itself, or a folder with the compressed copy that a visit to a GPU brings home."""
    given = Path(path).expanduser()
    if not given.is_dir():
        with Store(given, create=False) as store:
            yield store
        return
    parts = sorted(given.glob("store.sqlite.gz.*"))
    if not parts:
        raise FileFormatError(f"{given} holds no store.sqlite.gz.* of a visit; give a store or such a folder.")
    with tempfile.TemporaryDirectory(prefix="tilewise-store-") as folder:
        copy = Path(folder) / "store.sqlite"
        try:
            copy.write_bytes(gzip.decompress(b"".join(part.read_bytes() for part in parts)))
        except (OSError, EOFError, sqlite3.Error) as error:
            raise FileFormatError(f"The parts in {given} do not unpack to a store; copy them again.") from error
        with Store(copy, create=False) as store:
            yield store
