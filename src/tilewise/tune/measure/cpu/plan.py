"""What a collection would measure, and about how long that takes here: counted, and every default run a few times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from tilewise.store.problem import Kernel, Problem
from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.measure.collector import Options
from tilewise.tune.measure.cpu.clock import one_run, running_on
from tilewise.tune.measure.schedule import pick_configs

_RUNS = 5  # the fastest counts: others may be busy now
_SLOWER = 1.25  # a configuration than the default, in the mean
_ROUNDS = 1.25  # of the rounds that all get, those that some need more
_RECORDING_S = 1.5e-4  # a timing's way into the store
_BESIDE = 1.25  # units of the default in a batch, and what was disturbed


def plan(kernels: Iterable[Kernel], options: Options) -> list[dict[str, Any]]:
    """A row for each family and number of threads: `kernels`, `configs` and expected `seconds`."""
    expected: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for kernel in kernels:
        expected[kernel.problem.family, kernel.problem.threads].append(_expected(kernel.problem, options))
    rows = []
    for (family, threads), each in sorted(expected.items()):
        configs, seconds = (sum(column) for column in zip(*each, strict=True))
        rows.append(
            {"family": family, "threads": threads, "kernels": len(each), "configs": configs, "seconds": seconds}
        )
    return rows


def _expected(problem: Problem, options: Options) -> tuple[int, float]:
    family, settings = get_family(problem.family), options.settings
    start = time.perf_counter()
    with running_on(problem.threads):
        configs = pick_configs(family.configs(problem), options.max_configs, 0)
        operands = family.operands(problem, np.random.default_rng(0))
        preparing = 2 * (time.perf_counter() - start)
        start = time.perf_counter()
        family.expected(problem, operands)
        preparing += 2 * (time.perf_counter() - start)
        run = family.runner(problem, configs[0], operands)
        run_s = min(one_run(run) for _ in range(_RUNS)) * 1e-9
    slower = run_s * _SLOWER
    unit = max(settings.unit_ms * 1e-3, slower) + (slower if run_s < settings.settle_ms * 1e-3 else 0.0)
    timings = len(configs) * settings.rounds * _ROUNDS + settings.finalists * settings.final_rounds
    checks = len(configs) * 4 * slower
    return len(configs), preparing + checks + timings * (unit + _RECORDING_S) * _BESIDE
