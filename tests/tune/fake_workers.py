"""Child processes that speak the collector's protocol without a compiler or a GPU; some misbehave on purpose."""

from __future__ import annotations

import os
import time
from typing import Any

from tilewise.tune.triton.compiling import Compiled
from tilewise.tune.triton.measure import Batch, Job, Verdict

DEADLY = {"block_m": 32}  # configurations that end the process
TOO_BIG = 256  # block_m whose binaries need more shared memory than there is


def compile_nothing(connection: Any, capability: int, cache: str) -> None:
    while True:
        try:
            binary = connection.recv()
        except EOFError:
            return
        constants = dict(binary.constants)
        if constants.get("BLOCK_M") == 16:
            connection.send(Compiled(0, 0.0, "does not compile: planted"))
        else:
            connection.send(Compiled(300_000 if constants.get("BLOCK_M") == TOO_BIG else 1000, 0.0))


def _is_deadly(config: Any) -> bool:
    return all(config.get(name) == value for name, value in DEADLY.items())


def _serve(connection: Any, die: Any) -> None:
    connection.send(("device", {"name": "Fake GPU"}))
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        for config in job.configs:
            if job.careful:
                connection.send(("next", config))
            if _is_deadly(config):
                die()
        connection.send(("verdicts", [Verdict(config, "ok") for config in job.configs]))
        rest = tuple(range(1, len(job.configs)))
        for number in range(3):
            times = tuple(1000.0 + 10 * index + number for index in rest)
            connection.send(("batch", Batch(number, rest, times, 900.0, False, {})))
        connection.send(("done", 0.01))


def serve_crashing(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    _serve(connection, lambda: os._exit(3))


def serve_hanging(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    _serve(connection, lambda: time.sleep(3600))


def serve_well(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    DEADLY["block_m"] = -1
    _serve(connection, None)


def serve_absent(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    connection.send(("unavailable", "PyTorch sees no CUDA GPU here."))
