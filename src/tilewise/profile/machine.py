"""The machine's peak rates: FLOP/s per instruction set, bandwidth by working-set size, and cache sizes.

Reports compare programs with these rates (the roofline model, Williams et al. 2009). The rates come from probes in the
extension: independent multiply-adds in registers, reads and copies of arrays of growing size. Without the extension
NumPy gives an estimate, and the table says so. Rates are measured once and cached in a JSON file (see `cache_file`); a
file that is damaged or from another machine is ignored and replaced. Rates that contradict each other, or that were
measured on a busy machine, are not cached (`tilewise.profile.machine`): the next process measures again.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise._extension import native
from tilewise._files import read_json_input
from tilewise._system import CacheLevel, cache_folder, caches, cores, cpu_name, machine_override_text, real_cores
from tilewise.errors import TilewiseError
from tilewise.profile.timing.stability import MachineReading, machine_reasons, read_machine

_SCHEMA = 3  # version of the cache file
# Working sets in bytes, from inside the L1 cache to main memory.
_SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]


@dataclass(frozen=True)
class Peak:
    """Peak float32 operations per second (2 per multiply-add) with one instruction set."""

    isa: str
    threads: int
    flops_per_second: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second over a working set of `bytes`: read only, and copied (bytes read plus bytes written)."""

    bytes: int
    threads: int
    read: float
    copy: float


@dataclass(frozen=True)
class MachineFigures:
    """Peak rates of this machine."""

    cpu: str
    cpus: int
    method: str
    peaks: list[Peak]
    bandwidths: list[Bandwidth]
    caches: list[CacheLevel]
    fresh_memory: float  # bytes per second of allocating memory from the system, filling it and freeing it
    doubts: list[str] = field(default_factory=list)  # why the rates are not cached; empty if they are reliable

    def peak(self, threads: int = 1, isa: str | None = None) -> float:
        """Return the peak FLOP/s of an instruction set (None: the active one) with this many threads."""
        isa = isa or active_isa()
        rows = [p for p in self.peaks if p.isa == isa] or self.peaks
        nearest = min(rows, key=lambda p: (abs(p.threads - threads), -p.flops_per_second))
        return nearest.flops_per_second

    def bandwidth(self, working_set: float, threads: int = 1, of: str = "copy") -> float:
        """Return copy or read bandwidth (`of`) in bytes/s for a working set in bytes, interpolated on a log scale."""
        nearest = min((b.threads for b in self.bandwidths), key=lambda n: abs(n - threads))
        rows = sorted((b for b in self.bandwidths if b.threads == nearest), key=lambda b: b.bytes)
        size = np.log(np.clip(working_set, rows[0].bytes, rows[-1].bytes))
        return float(np.interp(size, [np.log(b.bytes) for b in rows], [getattr(b, of) for b in rows]))

    def read_bandwidth(self, working_set: float) -> float:
        """Return one thread's read bandwidth in bytes/s for a working set in bytes."""
        return self.bandwidth(working_set, of="read")

    def memory_bandwidth(self, threads: int = 1) -> float:
        """Return the copy bandwidth of main memory in bytes/s."""
        return self.bandwidth(float("inf"), threads)

    def roofline_seconds(self, flops: float, bytes_moved: float, threads: int = 1) -> tuple[float, float]:
        """Return lower bounds in seconds for the arithmetic and for moving the bytes.

        The larger one bounds the runtime.
        """
        memory = bytes_moved / self.bandwidth(bytes_moved, threads) if bytes_moved else 0.0
        return flops / self.peak(threads), memory

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def active_isa() -> str:
    return str(native.isa()) if native is not None else "numpy"


def cache_file() -> Path:
    """Return the path of the cached rates; an emulated machine (TILEWISE_MACHINE) has a separate file."""
    return cache_folder() / ("machine-played.json" if machine_override_text() else "machine.json")


def machine(refresh: bool = False) -> MachineFigures:
    """Load this machine's peak rates from the cache, or measure them (a few seconds) and cache them if plausible."""
    cached = None if refresh else cached_machine()
    if cached is not None:
        return cached
    if refresh:
        _measure_once.cache_clear()
    rates = _measure_once(json.dumps(_identity()))
    if not rates.doubts:
        _measure_once.cache_clear()
        with suppress(TilewiseError):  # if the cache folder is read-only, the next process measures again
            text = json.dumps({"identity": _identity(), "machine": rates.as_dict()}, indent=1)
            write_atomic(cache_file(), text + "\n")
    return rates


def cached_machine() -> MachineFigures | None:
    """Load the rates from the cache file; None if the file is missing, damaged or from another machine."""
    with suppress(TilewiseError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        data = read_json_input(cache_file())
        if data["identity"] == _identity():
            rates = _from_dict(data["machine"])
            # Files of earlier versions were written without this check.
            return rates if not contradictions(rates) else None
    return None


@functools.lru_cache(maxsize=1)
def _measure_once(_identity_json: str) -> MachineFigures:
    """Measure the rates once per process; implausible rates are reused but not written to a file."""
    before = read_machine()
    rates = measure_machine()
    return replace(rates, doubts=find_doubts(rates, before, read_machine()))


def _identity() -> list[Any]:
    """Return the properties that must match for cached rates to be those of this machine."""
    isas = list(native.supported_isas()) if native is not None else ["numpy"]
    return [_SCHEMA, cpu_name(), real_cores(), isas, machine_override_text()]


def _from_dict(data: dict[str, Any]) -> MachineFigures:
    """Read the rates from parsed JSON; ValueError, LookupError or TypeError if they are invalid."""
    peaks = [Peak(str(p["isa"]), int(p["threads"]), float(p["flops_per_second"])) for p in data["peaks"]]
    bandwidths = [
        Bandwidth(int(b["bytes"]), int(b["threads"]), float(b["read"]), float(b["copy"])) for b in data["bandwidths"]
    ]
    caches = [CacheLevel(int(c["level"]), int(c["bytes"]), int(c["shared_by"])) for c in data["caches"]]
    fresh = float(data["fresh_memory"])
    rates = [fresh, *(p.flops_per_second for p in peaks), *(x for b in bandwidths for x in (b.read, b.copy))]
    if not peaks or not bandwidths or not all(np.isfinite(r) and r > 0 for r in rates):
        raise ValueError("rates are missing or not positive")
    counts = [*(p.threads for p in peaks), *(n for b in bandwidths for n in (b.bytes, b.threads))]
    if not all(0 < count < 1 << 60 for count in counts):
        raise ValueError("thread counts or sizes are out of range")
    return MachineFigures(
        cpu=str(data["cpu"]),
        cpus=int(data["cpus"]),
        method=str(data["method"]),
        peaks=peaks,
        bandwidths=bandwidths,
        caches=caches,
        fresh_memory=fresh,
    )


def measure_machine(
    sizes: list[int] | None = None, seconds: float = 0.02, threads: list[int] | None = None
) -> MachineFigures:
    """Measure all peak rates; each is the best of five tries of `seconds`."""
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
    return MachineFigures(
        cpu=cpu_name(),
        cpus=cores(),
        method=method,
        peaks=peaks,
        bandwidths=bandwidths,
        caches=caches(),
        fresh_memory=fresh,
    )


@contextmanager
def _restored_runtime() -> Iterator[None]:
    """Restore the instruction set and the thread count when the block ends."""
    assert native is not None
    isa, threads = native.isa(), native.num_threads()
    try:
        yield
    finally:
        native.set_isa(isa)
        native.set_num_threads(threads)


def _best_of_tries(run: Callable[[int], float], seconds: float, tries: int = 5) -> float:
    """Return the best of several rates in units per second; `run(rounds)` returns the units it processed."""
    rounds, best = 1, 0.0
    while tries:
        start = time.perf_counter()
        units = run(rounds)
        elapsed = max(time.perf_counter() - start, 1e-9)
        if elapsed < seconds / 2:  # too short to time: repeat with more rounds
            rounds = int(rounds * min(seconds / elapsed, 50.0)) + 1
            continue
        best = max(best, units / elapsed)
        tries -= 1
    return best


def _probe_peak(isa: str, threads: int, seconds: float) -> Peak:
    """Measure the arithmetic peak of an instruction set on `threads` threads."""
    assert native is not None
    native.set_isa(isa)
    native.set_num_threads(threads)
    return Peak(isa, threads, _best_of_tries(lambda rounds: float(native.probe_multiply_adds(1000 * rounds)), seconds))


def _bandwidth(
    size: int, threads: int, seconds: float, read: Callable[..., object], copy: Callable[..., object]
) -> Bandwidth:
    """Measure the bandwidth of a working set by the probes `read(array, rounds)` and `copy(target, source, rounds)`."""
    whole, half = np.ones(size // 4, np.float32), size // 8  # the working set of a copy is its source plus its target
    source, target = whole[:half], whole[half : 2 * half]

    def rate(run: Callable[..., object], *arrays: Any) -> float:
        """Return the best rate of a probe in bytes per second."""

        def bytes_of(rounds: int) -> float:
            run(*arrays, rounds)
            return float(size * rounds)

        return _best_of_tries(bytes_of, seconds)

    return Bandwidth(size, threads, rate(read, whole), rate(copy, target, source))


def _fresh_memory(size: int, seconds: float) -> float:
    """Measure the bytes per second of allocating and filling 1 MiB blocks without freeing any."""

    def run(rounds: int) -> float:
        """Allocate and fill `rounds` blocks; return their bytes."""
        for _ in range(rounds):
            blocks = [np.empty(1 << 18, np.float32) for _ in range(max(size >> 20, 1))]
            for block in blocks:
                block.fill(1.0)
        return float(max(size, 1 << 20) * rounds)

    return _best_of_tries(run, seconds, tries=3)


def _library_threads() -> int:
    """Return the threads of NumPy's BLAS: from its environment variables, else all CPUs."""
    settings = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    return min([real_cores(), *[int(text) for text in settings if text.isdigit() and int(text)][:1]])


def _numpy_peak(seconds: float) -> float:
    """Measure the FLOP/s of NumPy's product of two 512 × 512 matrices."""
    n = 512
    a, out = np.ones((n, n), np.float32), np.empty((n, n), np.float32)

    def run(rounds: int) -> float:
        for _ in range(rounds):
            np.matmul(a, a, out=out)
        return 2.0 * n**3 * rounds

    return _best_of_tries(run, seconds)


def _numpy_read(whole: Any, rounds: int) -> None:
    for _ in range(rounds):
        whole.max()


def _numpy_copy(target: Any, source: Any, rounds: int) -> None:
    for _ in range(rounds):
        np.copyto(target, source)


def memory_bytes() -> int:
    """Return the size of main memory in bytes; 4 GiB if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


# --- plausibility of measured figures ---


# Additional threads may share a core's arithmetic units or the memory bus and then gain nothing, but a rate below
# these fractions of the rate with fewer threads means that the measurement was disturbed.
_MIN_SCALING, _MIN_MEMORY_SCALING = 0.9, 0.75
# Twice the threads reach at most twice the rate; the margin allows for a change of the clock frequency.
_MAX_SCALING_PER_THREAD = 1.3
# FLOP/s or bytes/s per core: the slowest CPU is above the first, the fastest below a quarter of the second.
_PLAUSIBLE_RATE_PER_CORE = (1e8, 2e12)


def find_doubts(machine: MachineFigures, before: MachineReading, after: MachineReading) -> list[str]:
    """Return reasons not to cache these rates: contradictions, and load during the measurement."""
    return [*contradictions(machine), *machine_reasons(before, after)]


def contradictions(machine: MachineFigures) -> list[str]:
    """Return a sentence about each rate that is impossible or contradicts another."""
    return [*_impossible_rates(machine), *_implausible_scaling(machine), *_slow_caches(machine)]


def _impossible_rates(machine: MachineFigures) -> Iterator[str]:
    """Yield a sentence for each rate per core that no CPU reaches or stays below."""
    lowest, highest = _PLAUSIBLE_RATE_PER_CORE
    for peak in machine.peaks:
        if not lowest <= peak.flops_per_second / peak.threads <= highest:
            rate = f"{peak.flops_per_second:.2g} FLOP/s"
            yield f"{_threads(peak.threads)} with {peak.isa} reached {rate}, which is impossible for a CPU"
    for bandwidth in machine.bandwidths:
        rate_of_bytes = max(bandwidth.read, bandwidth.copy)
        if not lowest <= rate_of_bytes / bandwidth.threads <= highest:
            yield (
                f"{_threads(bandwidth.threads)} moved {rate_of_bytes:.2g} bytes per second, "
                "which is impossible for a CPU"
            )


def _implausible_scaling(machine: MachineFigures) -> Iterator[str]:
    """Yield a sentence for each rate that falls with more threads, or rises faster than their number."""
    for isa in dict.fromkeys(p.isa for p in machine.peaks):
        rates = {p.threads: p.flops_per_second for p in machine.peaks if p.isa == isa}
        yield from _check_scaling(rates, f"multiply-add rate with {isa}", _MIN_SCALING)
    largest = max(b.bytes for b in machine.bandwidths)
    rates = {b.threads: b.read for b in machine.bandwidths if b.bytes == largest}
    yield from _check_scaling(rates, "memory read bandwidth", _MIN_MEMORY_SCALING)


def _check_scaling(rates: dict[int, float], quantity: str, min_scaling: float) -> Iterator[str]:
    """Yield a sentence where rates of successive thread counts differ by an implausible factor."""
    for fewer, more in itertools.pairwise(sorted(rates)):
        gain = rates[more] / rates[fewer]
        if gain < min_scaling:
            yield f"{_threads(more)} reached only {gain:.2f} times the {quantity} of {_threads(fewer)}"
        elif gain > _MAX_SCALING_PER_THREAD * more / fewer:
            yield f"{_threads(more)} reached {gain:.1f} times the {quantity} of {_threads(fewer)}, which is impossible"


def _slow_caches(machine: MachineFigures) -> Iterator[str]:
    """Yield a sentence for each cache that one thread reads more slowly than main memory."""
    rows = sorted((b for b in machine.bandwidths if b.threads == 1), key=lambda b: b.bytes)
    if len(rows) > 1 and rows[0].read < _MIN_SCALING * rows[-1].read:
        yield f"the smallest working set was read at {rows[0].read / rows[-1].read:.2f} times the speed of memory"


def _threads(n: int) -> str:
    return "one thread" if n == 1 else f"{n} threads"
