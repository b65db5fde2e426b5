"""Shared by the benchmarks: functions run interleaved, medians are compared, and results are also written as JSON.

Peers run in the same process, at the same number of threads, in the same minutes. A ratio is the faster peer's time
over ours: above 1, tilewise is faster. Results are kept by kind of CPU: a run adds the machine it ran on and leaves
what others measured (`results_path`). With TILEWISE_ISA=avx2 the peers are held to AVX2 too (benchmarks/__init__.py).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import NOT_HELD, source_hash
from benchmarks.results_files import HOME_KIND, RESULTS, ROOT, folder_of
from tilewise import _system
from tilewise._atomic import write_atomic
from tilewise._environment import machine_override
from tilewise._extension import native

Run = Callable[[], Any]
_LONG_S = 0.05  # a call that needs no warm-up before each turn
_ISA_NAMES = {"portable": "SSE2", "avx2": "AVX2", "avx512": "AVX-512"}
_MAKES = (
    ("AuthenticAMD", "23", range(0x30), "Zen"),
    ("AuthenticAMD", "23", range(0x30, 0x100), "Zen 2"),
    ("AuthenticAMD", "25", (*range(0x10), *range(0x20, 0x60)), "Zen 3"),
    ("AuthenticAMD", "25", (*range(0x10, 0x20), *range(0x60, 0x100)), "Zen 4"),
    ("AuthenticAMD", "26", range(0x100), "Zen 5"),
    ("GenuineIntel", "6", (60, 63, 69, 70), "Haswell"),
    ("GenuineIntel", "6", (61, 71, 79, 86), "Broadwell"),
    ("GenuineIntel", "6", (78, 94, 142, 158, 165), "Skylake"),
    ("GenuineIntel", "6", (85,), "Skylake Xeon"),
    ("GenuineIntel", "6", (106, 108, 125, 126), "Ice Lake"),
    ("GenuineIntel", "6", (143,), "Sapphire Rapids"),
    ("GenuineIntel", "6", (207,), "Emerald Rapids"),
    ("GenuineIntel", "6", (173, 174), "Granite Rapids"),
    ("GenuineIntel", "6", (151, 154, 183, 186, 191), "Alder Lake"),
)


@dataclass(frozen=True)
class Row:
    """One line of a table: a case, its threads, the median seconds of each contender, and the ratio."""

    name: str
    threads: int
    seconds: dict[str, float]
    ratio: float
    date: str = ""  # when it was written
    source: str = ""  # hash of the kernel sources it timed
    errors: dict[str, float] | None = None  # of the contenders' results, where they are compared

    def __str__(self) -> str:
        times = "  ".join(f"{who} {seconds * 1e6:10.1f}" for who, seconds in self.seconds.items())
        return f"{self.name:34s} threads {self.threads}: {times} µs  {self.ratio:6.2f}×"


def compare(name: str, threads: int, runs: dict[str, Run], budget_s: float = 1.0) -> Row:
    """Time `runs` (ours is "tilewise") against each other for about `budget_s` seconds, and print the row."""
    seconds = interleaved(runs, threads, budget_s)
    peers = [value for who, value in seconds.items() if who != "tilewise" and NOT_HELD not in who]
    row = Row(name, threads, seconds, min(peers) / seconds["tilewise"])
    print(row, flush=True)
    return row


def interleaved(runs: dict[str, Run], threads: int, budget_s: float) -> dict[str, float]:
    """Median seconds of one call of each, the contenders taking turns of about a millisecond."""
    repeats, times = _repeats(runs), {who: list[float]() for who in runs}
    start_of_all = time.perf_counter()
    while time.perf_counter() < start_of_all + budget_s or len(next(iter(times.values()))) < _least(times):
        for who, run in runs.items():
            _settle(threads)
            if threads > 1 or not times[who] or times[who][-1] < _LONG_S:
                _warm_up(run, threads)
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[who].append((time.perf_counter() - start) / repeats)
    return {who: statistics.median(values) for who, values in times.items()}


def _least(times: dict[str, list[float]]) -> int:
    """Rounds that a median needs; fewer of long ones, which nothing short disturbs."""
    return 5 if sum(own[-1] for own in times.values() if own) > 10 * _LONG_S else 7


@contextmanager
def without_winograd() -> Iterator[None]:
    """tilewise's float32 with direct convolutions only, in plans and outside."""
    if native is not None:
        native.allow_winograd(False)
    try:
        yield
    finally:
        if native is not None:
            native.allow_winograd(True)


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
    """Return the number of calls of the fastest function that take a millisecond; this also warms up."""
    quickest = float("inf")
    for run in runs.values():
        for _ in range(3):
            start = time.perf_counter()
            run()
            quickest = min(quickest, time.perf_counter() - start)
    return max(1, int(1e-3 / quickest))


def write_results(path: Path, rows: Iterable[Row], keep: bool = False) -> None:
    """The rows, each with its date, and the machine they were measured on, as JSON in the place of its kind of CPU.

    With `keep`, rows of the file that were not measured now stay as they are.
    """
    dated = [replace(row, date=row.date or today(), source=row.source or source_hash(path.stem)) for row in rows]
    new_keys = {(row.name, row.threads) for row in dated}
    old_rows = [row for row in read_rows(path) if (row.name, row.threads) not in new_keys] if keep else []
    lines = [{k: v for k, v in asdict(row).items() if v not in (None, "")} for row in (*old_rows, *dated)]
    content = {"date": today(), "machine": machine_class(), **provenance(path.stem), "rows": lines}
    write_atomic(results_path(path), json.dumps(content, indent=1) + "\n")


# Distributions of the libraries that tilewise is compared with.
PEER_PACKAGES = (
    "numpy", "torch", "onnxruntime", "openvino", "scipy", "llama-cpp-python", "ctranslate2", "tensorflow", "timm",
    "pyperf", "memray",
)  # fmt: skip


def provenance(file: str) -> dict[str, Any]:
    """The commit, kernel sources, load and peers' versions of the last run that wrote a results file."""
    versions = {}
    for package in PEER_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"commit": commit or "unknown", "source": source_hash(file), "load": load, "peers": versions}


def read_rows(path: Path) -> list[Row]:
    """The rows of this kind of CPU's results file, each with its date; none where there is no such file."""
    if not results_path(path).is_file():
        return []
    results = json.loads(results_path(path).read_text(encoding="utf-8"))
    return [Row(**{"date": results.get("date", ""), **row}) for row in results["rows"]]


def results_path(path: Path) -> Path:
    """Return the results file of this machine: in benchmarks/results for the home CPU, else in a folder of its CPU.

    A path outside benchmarks/results is returned unchanged.
    """
    if path.resolve().parent != RESULTS or cpu_kind() == HOME_KIND:
        return path
    folder = RESULTS / folder_of(cpu_kind())
    folder.mkdir(exist_ok=True)
    return folder / path.name


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine_class() -> dict[str, Any]:
    """Return the kind of this machine, without identifying it."""
    isa = native.isa() if native is not None else "none"
    cpus = os.cpu_count() if machine_override().cores is None else _system.cores()  # not those of a pinned run
    caches = {f"l{level.level}": level.bytes for level in _system.caches()}
    return {"kind": cpu_kind(), "cpu": _system.cpu_name(), "cpus": cpus, "kernels": isa, **caches}


def cpu_kind() -> str:
    """The CPU's make and the instructions in force: "Zen 4, AVX-512", or "Zen 4 as AVX2" where it is held to less."""
    make = _make() or _system.cpu_name()
    if native is None:
        return f"{make}, NumPy"
    name = _ISA_NAMES.get(native.isa(), native.isa())
    kind = f"{make}, {name}" if native.isa() == native.supported_isas()[-1] else f"{make} as {name}"
    return f"{kind}, playing {_system.machine_override_text()}" if _system.machine_override_text() else kind


def _make() -> str:
    """The design of an x86 CPU by its family and model, since virtual machines give it other names."""
    fields = dict.fromkeys(("vendor_id", "cpu family", "model"), "")
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            fields[name] = value
    vendor, family, model = fields["vendor_id"], fields["cpu family"], fields["model"]
    for made_by, of_family, models, make in _MAKES:
        if (vendor, family) == (made_by, of_family) and model.isdigit() and int(model) in models:
            return make
    return ""
