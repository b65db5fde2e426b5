"""One function timed by pyperf and by `Timer` in turn, in the same processes.

    python -m benchmarks.beside_pyperf benchmarks.profiling:spin_1ms

pyperf starts its worker processes, calibrates and takes its values as always; between two of its values `Timer`
measures the same function. A Python function differs by several percent from one process to the next and, where other
programs share the machine, from one second to the next, whoever measures it; so the two must meet the same of both.
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
from tilewise.profile.processes import resolve

PROCESSES, VALUES = 5, 10


def main(name: str) -> None:
    if "--worker" in sys.argv:
        _worker(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BESIDE_PYPERF"] = folder
        _runner(name).bench_time_func(name, lambda loops: 0.0)
        pairs = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    ours, theirs = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(a / b for a, b in pairs)
    print(json.dumps({"ours": ours, "pyperf": theirs, "ratio": ratio, "pairs": pairs}))


def _worker(name: str) -> None:
    func, ours = resolve(name), []

    def value(loops: int) -> float:
        ours.append(Timer(sample_seconds=5e-3).measure(func, warmup=1, runs=6).p50)
        return _as_bench_func(func, loops)

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
    own = ["--quiet", "--inherit-environ", "PYTHONPATH,BESIDE_PYPERF"]
    runner.parse_args(sys.argv[2:] if "--worker" in sys.argv else own)
    return runner


if __name__ == "__main__":
    main(sys.argv[1])
