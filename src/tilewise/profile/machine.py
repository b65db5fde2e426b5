"""The machine's ceilings, measured once and kept: multiply-adds a second, bytes a second by working-set size, caches.

Every report is drawn against these figures, so they come from probes in the extension that do nothing else: independent
multiply-adds in registers, reads and copies of arrays of growing size. Without the extension NumPy gives an estimate,
and the table says so. The figures live in one JSON file (see `cache_file`); a file that is damaged or from another
machine is measured again. Figures that contradict each other or that a busy machine gave are not kept at all
(`tilewise.profile.doubts`): the next process measures again.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise._files import read_json_input, write_whole
from tilewise._system import cache_folder, caches, cores, cpu_name, pretence, real_cores
from tilewise.errors import TilewiseError
from tilewise.profile.doubts import contradictions, doubts
from tilewise.profile.timing.stability import read_machine

_SCHEMA = 3
_SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


@dataclass(frozen=True)
class Peak:
    """The most floating-point operations a second (2 per multiply-add, float32) for one instruction set."""

    isa: str
    threads: int
    flops_per_second: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second over a working set of `bytes`: read only, and copied (read and written bytes together)."""

    bytes: int
    threads: int
    read: float
    copy: float


@dataclass(frozen=True)
class Cache:
    """One level of data cache as one core sees it, and how many CPUs share it."""

    level: int
    bytes: int
    shared_by: int


@dataclass(frozen=True)
class Machine:
    """What this machine can do at most."""

    cpu: str
    cpus: int
    method: str
    peaks: list[Peak]
    bandwidths: list[Bandwidth]
    caches: list[Cache]
    fresh_memory: float  # bytes a second of taking memory from the system, filling it and giving it back
    doubts: list[str] = field(
        default_factory=list
    )  # why these figures are not kept; empty where they are to be trusted

    def peak(self, threads: int = 1, isa: str | None = None) -> float:
        """FLOP/s of the instruction set in force (or `isa`) with this many threads."""
        wanted = isa or active_isa()
        rows = [p for p in self.peaks if p.isa == wanted] or self.peaks
        one = min(rows, key=lambda p: (abs(p.threads - threads), -p.flops_per_second))
        return one.flops_per_second

    def bandwidth(self, working_set: float, threads: int = 1, of: str = "copy") -> float:
        """Bytes a second copied (or `of="read"`) for this working set, interpolated on the logarithm of the size."""
        nearest = min((b.threads for b in self.bandwidths), key=lambda n: abs(n - threads))
        rows = sorted((b for b in self.bandwidths if b.threads == nearest), key=lambda b: b.bytes)
        size = np.log(np.clip(working_set, rows[0].bytes, rows[-1].bytes))
        return float(np.interp(size, [np.log(b.bytes) for b in rows], [getattr(b, of) for b in rows]))

    def read_bandwidth(self, working_set: float) -> float:
        """What one thread reads of this working set."""
        return self.bandwidth(working_set, of="read")

    def memory_bandwidth(self, threads: int = 1) -> float:
        """Copy bandwidth of main memory."""
        return self.bandwidth(float("inf"), threads)

    def roofline_seconds(self, flops: float, bytes_moved: float, threads: int = 1) -> tuple[float, float]:
        """The least that arithmetic takes, and the least that moving the bytes takes; a program takes the larger."""
        memory = bytes_moved / self.bandwidth(bytes_moved, threads) if bytes_moved else 0.0
        return flops / self.peak(threads), memory

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def active_isa() -> str:
    return str(native.isa()) if native is not None else "numpy"


def cache_file() -> Path:
    """Where this machine's figures are kept; those of a played one (TILEWISE_MACHINE) do not replace them."""
    return cache_folder() / ("machine-played.json" if pretence() else "machine.json")


def machine(refresh: bool = False) -> Machine:
    """This machine's ceilings: from the kept file, or measured now (a few seconds) and kept, unless doubtful."""
    kept = None if refresh else kept_machine()
    if kept is not None:
        return kept
    if refresh:
        _measured_once.cache_clear()
    measured = _measured_once(json.dumps(_identity()))
    if not measured.doubts:
        _measured_once.cache_clear()
        with suppress(TilewiseError):  # a read-only home is no reason to fail: it will be measured again next time
            text = json.dumps({"identity": _identity(), "machine": measured.as_dict()}, indent=1)
            write_whole(cache_file(), text + "\n")
    return measured


def kept_machine() -> Machine | None:
    """The ceilings in the kept file; None where there is none, or it is damaged or another machine's."""
    with suppress(TilewiseError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        kept = read_json_input(cache_file())
        if kept["identity"] == _identity():
            figures = _from_dict(kept["machine"])
            return figures if not contradictions(figures) else None  # kept before anybody looked
    return None


@functools.lru_cache(maxsize=1)
def _measured_once(_of: str) -> Machine:
    """Doubtful figures serve this process, so that it does not measure at every report."""
    before = read_machine()
    figures = measure_machine()
    return replace(figures, doubts=doubts(figures, before, read_machine()))


def _identity() -> list[Any]:
    """What must agree for kept figures to be this machine's."""
    isas = list(native.supported_isas()) if native is not None else ["numpy"]
    return [_SCHEMA, cpu_name(), real_cores(), isas, pretence()]


def _from_dict(data: dict[str, Any]) -> Machine:
    peaks = [Peak(str(p["isa"]), int(p["threads"]), float(p["flops_per_second"])) for p in data["peaks"]]
    bandwidths = [
        Bandwidth(int(b["bytes"]), int(b["threads"]), float(b["read"]), float(b["copy"])) for b in data["bandwidths"]
    ]
    caches = [Cache(int(c["level"]), int(c["bytes"]), int(c["shared_by"])) for c in data["caches"]]
    fresh = float(data["fresh_memory"])
    rates = [fresh, *(p.flops_per_second for p in peaks), *(x for b in bandwidths for x in (b.read, b.copy))]
    if not peaks or not bandwidths or not all(np.isfinite(r) and r > 0 for r in rates):
        raise ValueError("figures are missing or not positive")
    counts = [*(p.threads for p in peaks), *(n for b in bandwidths for n in (b.bytes, b.threads))]
    if not all(0 < count < 1 << 60 for count in counts):
        raise ValueError("counts that no machine has")
    return Machine(str(data["cpu"]), int(data["cpus"]), str(data["method"]), peaks, bandwidths, caches, fresh)


def measure_machine(sizes: list[int] | None = None, seconds: float = 0.02, threads: list[int] | None = None) -> Machine:
    """Run the probes; `seconds` is the length of one of the five tries whose best is kept."""
    counts = threads or sorted({1, *(n for n in (2, 4, 8, 16, 32, 64, 128) if n < real_cores()), real_cores()})
    sizes = sizes or [s for s in _SIZES if s <= memory_bytes() // 16]
    if native is None:
        peaks = [Peak("numpy", _library_threads(), _numpy_peak(seconds))]
        bandwidths = [_bandwidth(size, 1, seconds, _numpy_read, _numpy_copy) for size in sizes]
        method = "estimated with NumPy (matmul and copies), because the extension is not installed"
    else:
        with _restored_runtime():
            peaks = [_probe_peak(isa, n, seconds) for n in counts for isa in native.supported_isas()]
            native.set_isa(native.supported_isas()[-1])
            bandwidths = []
            for n in counts:
                native.set_num_threads(n)
                probes = native.probe_read, native.probe_copy
                bandwidths += [_bandwidth(size, n, seconds, *probes) for size in sizes]
        method = "measured by native probes"
    fresh = _fresh_memory(min(max(sizes), 64 << 20), seconds)
    levels = [Cache(*level) for level in caches()]
    return Machine(cpu_name(), cores(), method, peaks, bandwidths, levels, fresh)


@contextmanager
def _restored_runtime() -> Iterator[None]:
    assert native is not None
    isa, threads = native.isa(), native.num_threads()
    try:
        yield
    finally:
        native.set_isa(isa)
        native.set_num_threads(threads)


def _best_rate(run: Callable[[int], float], seconds: float, tries: int = 5) -> float:
    """The best of several tries in units a second; run(rounds) returns the units it did."""
    rounds, best = 1, 0.0
    while tries:
        start = time.perf_counter()
        units = run(rounds)
        elapsed = max(time.perf_counter() - start, 1e-9)
        if elapsed < seconds / 2:
            rounds = int(rounds * min(seconds / elapsed, 50.0)) + 1
            continue
        best = max(best, units / elapsed)
        tries -= 1
    return best


def _probe_peak(isa: str, threads: int, seconds: float) -> Peak:
    assert native is not None
    native.set_isa(isa)
    native.set_num_threads(threads)
    return Peak(isa, threads, _best_rate(lambda rounds: float(native.probe_multiply_adds(1000 * rounds)), seconds))


def _bandwidth(
    size: int, threads: int, seconds: float, read: Callable[..., object], copy: Callable[..., object]
) -> Bandwidth:
    """By `read(array, rounds)` and `copy(target, source, rounds)`."""
    whole, half = np.ones(size // 4, np.float32), size // 8  # a copy's working set is its source and its target
    source, target = whole[:half], whole[half : 2 * half]

    def rate(run: Callable[..., object], *arrays: Any) -> float:
        def bytes_of(rounds: int) -> float:
            run(*arrays, rounds)
            return float(size * rounds)

        return _best_rate(bytes_of, seconds)

    return Bandwidth(size, threads, rate(read, whole), rate(copy, target, source))


def _fresh_memory(size: int, seconds: float) -> float:
    """Blocks of 1 MiB held together, as a wasteful layer holds its temporaries, so that none is reused."""

    def run(rounds: int) -> float:
        for _ in range(rounds):
            held = [np.empty(1 << 18, np.float32) for _ in range(max(size >> 20, 1))]
            for block in held:
                block.fill(1.0)
        return float(max(size, 1 << 20) * rounds)

    return _best_rate(run, seconds, tries=3)


def _library_threads() -> int:
    """How many threads NumPy's matrix product uses: what the environment says, else every CPU."""
    asked = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    return min([real_cores(), *[int(words) for words in asked if words.isdigit() and int(words)][:1]])


def _numpy_peak(seconds: float) -> float:
    n = 512
    a, out = np.ones((n, n), np.float32), np.empty((n, n), np.float32)

    def run(rounds: int) -> float:
        for _ in range(rounds):
            np.matmul(a, a, out=out)
        return 2.0 * n**3 * rounds

    return _best_rate(run, seconds)


def _numpy_read(whole: Any, rounds: int) -> None:
    for _ in range(rounds):
        whole.max()


def _numpy_copy(target: Any, source: Any, rounds: int) -> None:
    for _ in range(rounds):
        np.copyto(target, source)


def memory_bytes() -> int:
    """The memory of this machine; 4 GiB where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
