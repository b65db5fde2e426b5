"""This CPU as the tuner sees it: its native kernels' families, their tiles, and trials of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tilewise import __version__
from tilewise.tune.bench import FamilyBench
from tilewise.tune.cpu.family import CpuFamily, get_family
from tilewise.tune.cpu.machine import describe, running_on
from tilewise.tune.problem import Config, Problem
from tilewise.tune.trial import CpuTrial, Trial, WorkerTrial, cpu_worker

COLLECTION = "cpu"
# In logarithms of runtime. The analytical default is good; on held-out programs a model's choice that promises less
# than this is as often slower than the default as it is faster.
MARGIN = 0.045
_COLLECTION_ISA = "avx512"  # what the embedded collection was measured with


class CpuBench(FamilyBench[CpuFamily]):
    """Problems of the native kernels. With `limit_s` they are measured in a process of their own."""

    version = __version__
    margin = MARGIN

    def __init__(self, limit_s: float | None = None) -> None:
        details = describe()
        fits = str(details["isa"]).startswith(_COLLECTION_ISA)
        super().__init__("cpu", details, get_family, COLLECTION if fits else None)
        self.limit_s = limit_s

    def configs(self, problem: Problem) -> Sequence[Config]:
        with running_on(problem.size("threads") if "threads" in problem else 1):
            return get_family(problem.family).configs(problem)

    def forget(self) -> None:
        """Nothing is compiled at run time."""

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Trial]:
        if self.limit_s is None:
            yield CpuTrial(problem, default)
            return
        with cpu_worker() as worker:
            yield WorkerTrial(worker, problem, default, self.limit_s)
