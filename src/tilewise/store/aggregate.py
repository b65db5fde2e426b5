"""Aggregates the timings in a store to one runtime per configuration.

A configuration's runtime is computed from its undisturbed timings, or from all if fewer than two are undisturbed. If it
was in the finals (`tune/measure/sampling.py`), only timings of the finals count. On a GPU the runtime is their median,
on a CPU the mean of the faster two of three. Drift correction: the finals, and each run of an interrupted kernel, are
scaled so that their default configuration matches the last reliable one; a slow hour must not look like a slow tile.
Configurations with a single timing, and those that any run found wrong, are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise._files import read_input
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError
from tilewise.store.database import is_url
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import MAX_STORE_BYTES, BatchRow, Store

FIRST_FINAL_ROUND = 100  # rounds from this number on are finals; earlier rounds are far fewer
MIN_FINAL_TIMINGS = 3  # with fewer timings in the finals, all rounds count; "two of three" needs three
_MAX_PIECE_BYTES = 256 << 20  # limit for one file of a split store
_CONTENDERS_PER_FINALIST = 3  # arbitrary: more cost time, fewer may miss the best
Average = Callable[[Sequence[float]], float]

LIBRARIES = ("dict", "pandas", "polars")


@dataclass(frozen=True)
class ConfigTiming:
    """Runtime of one configuration, the relative standard deviation of its repeats, and their number."""

    config: Config
    runtime_ns: float
    deviation: float
    repeats: int


@dataclass(frozen=True)
class MeasuredProblem:
    """A kernel with the runtimes of all its configurations, including the default."""

    kernel: Kernel
    default: Config
    default_ns: float
    timings: tuple[ConfigTiming, ...]


def read_measured(store: Store) -> list[MeasuredProblem]:
    """Return every finished kernel of a store with the runtimes of its configurations."""
    results = []
    finished = store.finished()
    for kernel in store.kernels():
        if kernel.problem.key in finished:
            default = store.default_config(kernel)
            result = measured_problem(store, kernel, default) if default is not None else None
            if result is not None:
                results.append(result)
    return results


def measured_problem(store: Store, kernel: Kernel, default: Config) -> MeasuredProblem | None:
    """Aggregate the timings of one kernel; None with fewer than two configurations or without the default."""
    batches = store.batches(kernel)
    if not batches:
        return None
    rejected = {config.key for config, status, _ in store.verdicts(kernel) if status != "ok"}
    machines = store.machines()
    if not machines:
        raise store.damage_error("timings without a machine")
    average = faster_two_of_three if machines[-1].kind == "cpu" else statistics.median
    scale, default_ns = _drift_corrections(batches, average)
    # Drift-corrected timings of each configuration: all, the undisturbed ones, and those of the finals among these.
    times, undisturbed, final = (defaultdict[str, list[float]](list) for _ in range(3))
    for batch in batches:
        tables = [times] if batch.disturbed else [times, undisturbed]
        if not batch.disturbed and batch.round >= FIRST_FINAL_ROUND:
            tables.append(final)
        for key, runtime_ns in ((default.key, batch.default_ns), *batch.runtime_ns.items()):
            for table in tables:
                table[key].append(runtime_ns * scale[_session(batch)])
    best_times = {
        key: final[key] if len(final[key]) >= MIN_FINAL_TIMINGS
        else undisturbed[key] if len(undisturbed[key]) > 1
        else times[key]
        for key in times if key not in rejected
    }  # fmt: skip
    timings = tuple(
        ConfigTiming(Config.parse(key), average(ns), statistics.stdev(ns) / statistics.median(ns), len(ns))
        for key, ns in best_times.items()
        if len(ns) > 1
    )
    if default not in {timing.config for timing in timings} or len(timings) < 2:
        return None
    # All sessions were scaled to this time of the default, so it is exact for the default itself.
    exact = tuple(replace(t, runtime_ns=default_ns) if t.config == default else t for t in timings)
    return MeasuredProblem(kernel, default, default_ns, exact)


def contenders(store: Store, kernel: Kernel, finalists: int) -> list[Config]:
    """Return the default and the fastest configurations of a finished kernel, somewhat more than `finalists`."""
    default = store.default_config(kernel)
    result = measured_problem(store, kernel, default) if default is not None else None
    if result is None:
        return [default] if default is not None else []
    others = sorted((t for t in result.timings if t.config != default), key=lambda timing: timing.runtime_ns)
    return [result.default, *(timing.config for timing in others[: _CONTENDERS_PER_FINALIST * finalists])]


def _session(batch: BatchRow) -> tuple[int, bool]:
    """Return the (run, whether in the finals) of a batch; timings with equal values are directly comparable."""
    return batch.run, batch.round >= FIRST_FINAL_ROUND


def _drift_corrections(batches: Sequence[BatchRow], average: Average) -> tuple[dict[tuple[int, bool], float], float]:
    """Return each session's factor that scales its default's time to the last reliable one's, and that time."""
    undisturbed: dict[tuple[int, bool], list[float]] = defaultdict(list)
    all_times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for batch in batches:
        all_times[_session(batch)].append(batch.default_ns)
        if not batch.disturbed:
            undisturbed[_session(batch)].append(batch.default_ns)
    default_ns = {session: average(undisturbed.get(session) or times) for session, times in all_times.items()}
    last_reliable = ([batch for batch in batches if not batch.disturbed] or batches)[-1]
    reference_ns = default_ns[_session(last_reliable)]
    return {session: reference_ns / session_ns for session, session_ns in default_ns.items()}, reference_ns


def unpack_store(files: Sequence[Path], target: Path) -> None:
    """Decompress a gzipped store, split into `files`, to `target`; at most `MAX_STORE_BYTES`."""
    decompressor, total = zlib.decompressobj(wbits=31), 0
    try:
        with target.open("wb") as out:
            for path in files:
                data = read_input(path, _MAX_PIECE_BYTES)
                while data and not decompressor.eof:
                    content = decompressor.decompress(data, 1 << 20)
                    data, total = decompressor.unconsumed_tail, total + len(content)
                    if total > MAX_STORE_BYTES:
                        raise FileFormatError(f"{path} unpacks to more than a store of {MAX_STORE_BYTES >> 30} GiB.")
                    out.write(content)
    except zlib.error as error:
        raise FileFormatError(f"{files[0]} and its parts do not unpack to a store; copy them again.") from error
    if not decompressor.eof:
        raise FileFormatError(f"{files[-1]} is cut short, or a part is missing; copy them again.")


@contextlib.contextmanager
def open_measurements(path: str | os.PathLike[str], machine: str | None = None) -> Iterator[Store]:
    """Open an existing store for reading.

    `path` is a SQLite file, a folder with a compressed copy in several files (``store.sqlite.gz.*``), or a
    postgresql:// URL, for which `machine` selects the partition.
    """
    if is_url(path):
        with Store(path, create=False, partition=machine) as store:
            yield store
        return
    location = Path(path).expanduser()
    if not location.is_dir():
        with Store(location, create=False) as store:
            yield store
        return
    files = sorted(location.glob("store.sqlite.gz.*"))
    if not files:
        raise FileFormatError(f"{location} contains no store.sqlite.gz.* files; give a store or a folder with them.")
    with tempfile.TemporaryDirectory(prefix="tilewise-store-") as folder:
        copy = Path(folder) / "store.sqlite"
        unpack_store(files, copy)
        with Store(copy, create=False) as store:
            yield store


# Other activity on a machine only ever slows a timing down, so the faster timings are more informative. But the mean
# of the faster half falls as timings are added, so that a configuration with more timings would look faster. The mean
# of the faster two of three, averaged over all triples of timings, has the same expectation for any number of
# timings.
def faster_two_of_three(times: Sequence[float]) -> float:
    """Return the mean of the faster two, averaged over all triples of `times`; of fewer than three, the fastest.

    >>> faster_two_of_three([1.0, 9.0, 2.0])
    1.5
    """
    count = len(times)
    if count < 3:
        return min(times)
    # Sorted from the fastest, time i is the fastest of the triples whose other two come later, and the second of the
    # triples with one time before it and one after it. Its weight is the number of these triples.
    weights = [(count - 1 - i) * (count - 2 - i) / 2 + i * (count - 1 - i) for i in range(count)]
    return statistics.fmean(sorted(times), weights)


def frame(path: str | os.PathLike[str], library: str = "pandas") -> Any:
    """Return the finished kernels of a store: columns of the problem, of the configuration (``config_...``), and times.

    `library` is "pandas" or "polars", which tilewise does not install, or "dict" for plain lists by column.

    >>> frame("mine.sqlite").groupby("program")["speedup"].max()  # doctest: +SKIP
    """
    if library not in LIBRARIES:
        raise ConfigurationError(f"There is no library {library!r} for frames; use {', '.join(LIBRARIES)}.")
    columns = _columns(path)
    if library == "dict":
        return columns
    try:
        return importlib.import_module(library).DataFrame(columns)
    except ImportError:
        raise UnavailableError(f"{library} is not installed: pip install {library}, or pass library='dict'.") from None


def _columns(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Return a store's measurements as a list of values per column name; missing values are None."""
    rows: list[dict[str, Any]] = []
    with open_measurements(path) as store:
        for result in read_measured(store):
            for timing in result.timings:
                row: dict[str, Any] = {"program": result.kernel.program, **result.kernel.problem}
                row |= {f"config_{name}": value for name, value in timing.config.items()}
                row |= {"runtime_ns": timing.runtime_ns, "default_ns": result.default_ns}
                row["speedup"] = result.default_ns / timing.runtime_ns
                row["is_default"] = timing.config == result.default
                row |= {"deviation": timing.deviation, "repeats": timing.repeats}
                rows.append(row)
    # Families have different sizes and parameters, so rows have different columns.
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
