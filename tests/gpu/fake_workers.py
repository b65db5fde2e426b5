"""Fake child processes that follow the collector's protocol without a compiler or a GPU; some crash or hang."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from tilewise.gpu.measure.compiler import CompileResult
from tilewise.gpu.measure.execution import Job
from tilewise.store.reader import Verdict
from tilewise.tune.measure.sampling import Candidate, resume, time_all

DEADLY = {"block_m": 32}  # configurations that end the process
TOO_BIG = 256  # block_m of the binaries that need too much shared memory


def compile_nothing(connection: Any, capability: int, cache: str) -> None:
    while True:
        binary = connection.recv()
        constants = dict(binary.constants)
        if constants.get("BLOCK_M") == 16:
            connection.send(CompileResult(0, 0.0, "does not compile: planted"))
        else:
            connection.send(CompileResult(300_000 if constants.get("BLOCK_M") == TOO_BIG else 1000, 0.0))


def _is_deadly(config: Any) -> bool:
    return all(config.get(name) == value for name, value in DEADLY.items())


def _serve(connection: Any, die: Any) -> None:
    connection.send(("device", {"name": "Fake GPU"}))
    while True:
        job: Job = connection.recv()
        for config in job.configs:
            if job.careful:
                connection.send(("next", config))
            if _is_deadly(config):
                die()
        connection.send(("verdicts", [Verdict(config, "ok") for config in job.configs]))
        candidates = [Candidate(i, config, [int], unit=_Unit(i)) for i, config in enumerate(job.configs)]
        resume(FakeClock(), job.settings, candidates, job.earlier, lambda *message: connection.send(message))
        time_all(FakeClock(), job.settings, candidates, job.seed, lambda *message: connection.send(message))
        connection.send(("done", 0.01))


@dataclass
class _Unit:
    index: int

    def __call__(self) -> None:
        return


class FakeClock:
    """A clock on which the default takes 900 ns and the others at least 1000, times FAKE_SLOWER of the environment."""

    warm_up_seconds = 0.0

    def time_units(self, units: Any) -> list[float]:
        return list(self.each_unit(units))

    def each_unit(self, units: Any) -> Any:
        for unit in list(units):
            yield (1000.0 + 10 * unit.index if unit.index else 900.0) * float(os.environ.get("FAKE_SLOWER", "1"))

    def watch(self) -> dict[str, float]:
        return {}


def serve_crashing(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    _serve(connection, lambda: os._exit(3))


def serve_hanging(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    _serve(connection, lambda: time.sleep(3600))


def serve_healthy(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    DEADLY["block_m"] = -1
    _serve(connection, None)


def serve_absent(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    connection.send(("unavailable", "PyTorch sees no CUDA GPU here."))
