"""Estimate the size and duration of a collection: count configurations, and run every default a few times."""

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

_RUNS = 5  # of each default; the fastest counts, since other programs may be running
_MEAN_SLOWDOWN = 1.25  # mean runtime of configurations relative to the default; an estimate, as are the following
_EXTRA_ROUNDS = 1.25  # rounds relative to the minimum number
_RECORDING_S = 1.5e-4  # writing a timing to the store
_OVERHEAD = 1.25  # readings of the default and disturbed batches


def plan(kernels: Iterable[Kernel], options: Options) -> list[dict[str, Any]]:
    """Return a row per family and number of threads: `kernels`, `configs` and estimated `seconds`."""
    estimates_by_group: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for kernel in kernels:
        estimates_by_group[kernel.problem.family, kernel.problem.threads].append(_estimate(kernel.problem, options))
    rows = []
    for (family, threads), estimates in sorted(estimates_by_group.items()):
        configs, seconds = (sum(column) for column in zip(*estimates, strict=True))
        rows.append(
            {"family": family, "threads": threads, "kernels": len(estimates), "configs": configs, "seconds": seconds}
        )
    return rows


def _estimate(problem: Problem, options: Options) -> tuple[int, float]:
    """Number of configurations of a problem, and the seconds of measuring them."""
    family, settings = get_family(problem.family), options.settings
    start = time.perf_counter()
    with running_on(problem.threads):
        configs = pick_configs(family.configs(problem), options.max_configs, 0)
        operands = family.operands(problem, np.random.default_rng(0))
        preparation_s = 2 * (time.perf_counter() - start)
        start = time.perf_counter()
        family.expected(problem, operands)
        preparation_s += 2 * (time.perf_counter() - start)
        run = family.runner(problem, configs[0], operands)
        run_s = min(one_run(run) for _ in range(_RUNS)) * 1e-9
    mean_s = run_s * _MEAN_SLOWDOWN
    unit = max(settings.unit_ms * 1e-3, mean_s) + (mean_s if run_s < settings.settle_ms * 1e-3 else 0.0)
    timings = len(configs) * settings.rounds * _EXTRA_ROUNDS + settings.finalists * settings.final_rounds
    checks = len(configs) * 4 * mean_s
    return len(configs), preparation_s + checks + timings * (unit + _RECORDING_S) * _OVERHEAD
