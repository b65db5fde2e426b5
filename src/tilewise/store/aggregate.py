"""From the timings in a store to one runtime a configuration.

A configuration's runtime comes from its undisturbed timings (from all of them, where fewer than two were
undisturbed), and from those of the finals alone where it was in them (`tune/measure/racing.py`): on a GPU it is their
median, on a CPU the faster two of three. The finals, and each run of a kernel that was interrupted, are scaled by
what the default took in them, so that a slower hour does not look like a slower tile. Left out are configurations with
a single timing and those that any run found wrong.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilewise._files import read_input
from tilewise.errors import FileFormatError
from tilewise.store.home import is_url
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import MOST_STORE_BYTES, BatchRow, Store

FIRST_FINAL = 100  # rounds from this number on are finals
LEAST = 3  # timings in the finals, for them to count alone
_MOST_PART_BYTES = 256 << 20
_CONTENDERS = 3  # for each place in the finals
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
    middle = faster_two_of_three if store.machines()[-1].kind == "cpu" else statistics.median
    factor, default_ns = _scales(batches, middle)
    found: dict[str, _Times] = defaultdict(_Times)
    for batch in batches:
        for key, runtime_ns in ((default.key, batch.default_ns), *batch.runtime_ns.items()):
            found[key].add(batch, runtime_ns * factor[_part(batch)])
    chosen = {key: times.chosen() for key, times in found.items() if key not in refused}
    timings = tuple(_timing(Config.parse(key), times, middle) for key, times in chosen.items() if len(times) > 1)
    if default not in {timing.config for timing in timings} or len(timings) < 2:
        return None
    # All parts were brought to this one time of the default, so it is the default's own.
    exact = tuple(replace(t, runtime_ns=default_ns) if t.config == default else t for t in timings)
    return MeasuredProblem(kernel, default, default_ns, exact)


def contenders(store: Store, kernel: Kernel, finalists: int) -> list[Config]:
    """Of a finished kernel: the default, and the best few with those who may take their places in the finals."""
    default = store.default_config(kernel)
    measured = measured_problem(store, kernel, default) if default is not None else None
    if measured is None:
        return [default] if default is not None else []
    others = sorted((t for t in measured.timings if t.config != default), key=lambda timing: timing.runtime_ns)
    return [measured.default, *(timing.config for timing in others[: _CONTENDERS * finalists])]


@dataclass
class _Times:
    """The timings of one configuration."""

    every: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)  # undisturbed ones in the finals

    def add(self, batch: BatchRow, runtime_ns: float) -> None:
        self.every.append(runtime_ns)
        if not batch.disturbed:
            self.clean.append(runtime_ns)
            if batch.round >= FIRST_FINAL:
                self.final.append(runtime_ns)

    def chosen(self) -> list[float]:
        if len(self.final) >= LEAST:
            return self.final
        return self.clean if len(self.clean) > 1 else self.every


def _part(batch: BatchRow) -> tuple[int, bool]:
    """What was taken in one go: a run's rounds, or its finals."""
    return batch.run, batch.round >= FIRST_FINAL


def _scales(batches: Sequence[BatchRow], middle: Middle) -> tuple[dict[tuple[int, bool], float], float]:
    """By part, what its times are multiplied by; and the default's in the last sound one, which all are brought to."""
    clean: dict[tuple[int, bool], list[float]] = defaultdict(list)
    every: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for batch in batches:
        every[_part(batch)].append(batch.default_ns)
        if not batch.disturbed:
            clean[_part(batch)].append(batch.default_ns)
    usual = {part: middle(clean.get(part) or times) for part, times in every.items()}
    last = usual[_part(([batch for batch in batches if not batch.disturbed] or batches)[-1])]
    return {part: last / default_ns for part, default_ns in usual.items()}, last


def _timing(config: Config, times: Sequence[float], middle: Middle) -> Timing:
    return Timing(config, middle(times), statistics.stdev(times) / statistics.median(times), len(times))


def unfold_store(parts: Sequence[Path], target: Path) -> None:
    """Write the store whose compressed copy is in `parts`, a piece at a time and no more than a store may hold."""
    unfold, total = zlib.decompressobj(wbits=31), 0
    try:
        with target.open("wb") as out:
            for part in parts:
                piece = read_input(part, _MOST_PART_BYTES)
                while piece and not unfold.eof:
                    content = unfold.decompress(piece, 1 << 20)
                    piece, total = unfold.unconsumed_tail, total + len(content)
                    if total > MOST_STORE_BYTES:
                        raise FileFormatError(f"{part} unpacks to more than a store of {MOST_STORE_BYTES >> 30} GiB.")
                    out.write(content)
    except zlib.error as error:
        raise FileFormatError(f"{parts[0]} and its parts do not unpack to a store; copy them again.") from error
    if not unfold.eof:
        raise FileFormatError(f"{parts[-1]} is cut short, or a part is missing; copy them again.")


@contextlib.contextmanager
def open_measurements(path: str | os.PathLike[str], machine: str | None = None) -> Iterator[Store]:
    """An existing store: the file itself, a folder with the compressed copy that a visit to a GPU brings home, or a
    postgresql:// URL, where `machine` says whose measurements."""
    if is_url(path):
        with Store(path, create=False, part=machine) as store:
            yield store
        return
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
        unfold_store(parts, copy)
        with Store(copy, create=False) as store:
            yield store


# What else goes on in a machine only ever slows down, so the faster timings say more. But a mean of the faster half
# drops as timings are added, and a configuration that was timed more often would look faster. The faster two of three,
# averaged over every three of the timings, has the same expectation however many there are.
def faster_two_of_three(times: Sequence[float]) -> float:
    """The mean of the faster two, averaged over every three of `times`; of fewer than three, the fastest.

    >>> faster_two_of_three([1.0, 9.0, 2.0])
    1.5
    """
    count = len(times)
    if count < 3:
        return min(times)
    # The one in place i (from 0, fastest first) is the fastest of the threes whose others come later, and the second of
    # those with one before and one behind it.
    weights = [(count - 1 - i) * (count - 2 - i) / 2 + i * (count - 1 - i) for i in range(count)]
    return statistics.fmean(sorted(times), weights)
