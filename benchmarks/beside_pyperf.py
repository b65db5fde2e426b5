"""One function timed by pyperf and by `Timer` in turn, in the same processes.

    python -m benchmarks.beside_pyperf benchmarks.profiling:spin_1ms
    python -m benchmarks.beside_pyperf benchmarks.profiling:spin_1ms itself    (how far pyperf is from itself)

pyperf starts its worker processes, calibrates and takes its values as always; between two of its values `Timer`
measures the same function for about as long. A Python function differs by several percent from one process to the
next and, where other programs share the machine, from one second to the next, whoever measures it; so the two must
meet the same of both.
Printed as one line of JSON: the median over the processes of each one's p50, and of their ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import pyperf

from tilewise.profile import Timer
from tilewise.profile.timing.processes import resolve

PROCESSES, VALUES = 5, 8


def main(name: str, itself: bool) -> None:
    if "--worker" in sys.argv:
        _worker(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(BESIDE_PYPERF=folder, BESIDE_ITSELF="yes" if itself else "")
        _runner(name).bench_time_func(name, lambda loops: 0.0)
        pairs = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    ours, theirs = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(a / b for a, b in pairs)
    print(json.dumps({"ours": ours, "pyperf": theirs, "ratio": ratio, "pairs": pairs}))


def _worker(name: str) -> None:
    func, ours = resolve(name), []

    def other(loops: int) -> float:
        if os.environ.get("BESIDE_ITSELF"):
            return _as_bench_func(func, loops) / loops
        return Timer().measure(func, warmup=1, runs=max(3, min(20, loops))).p50

    def value(loops: int) -> float:
        # Whoever comes first finds the caches as pyperf's own code left them, so they take turns at that as well.
        first = len(ours) % 2 == 0
        if first:
            ours.append(other(loops))
        total_seconds = _as_bench_func(func, loops)
        if not first:
            ours.append(other(loops))
        return total_seconds

    bench = _runner(name).bench_time_func(name, value)
    if bench is not None and bench.get_nvalue() == VALUES:  # not in the worker that only calibrates
        pair = [statistics.median(ours[-VALUES:]), bench.median()]
        (Path(os.environ["BESIDE_PYPERF"]) / f"{os.getpid()}.json").write_text(json.dumps(pair))


def _as_bench_func(func: Callable[[], Any], loops: int) -> float:
    """The loop of pyperf's own bench_func."""
    turns = repeat(None, loops)
    start = perf_counter()
    for _ in turns:
        func()
    return perf_counter() - start


def _runner(name: str) -> pyperf.Runner:
    program = ("-m", "benchmarks.beside_pyperf", name)
    runner = pyperf.Runner(processes=PROCESSES, values=VALUES, warmups=1, program_args=program)
    own = ["--quiet", "--inherit-environ", "PYTHONPATH,BESIDE_PYPERF,BESIDE_ITSELF"]
    runner.parse_args(sys.argv[2:] if "--worker" in sys.argv else own)
    return runner


if __name__ == "__main__":
    main(sys.argv[1], "itself" in sys.argv[2:])
