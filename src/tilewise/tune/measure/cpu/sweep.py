"""Every configuration on this CPU, roughly."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.measure.cpu.clock import nanoseconds, running_on
from tilewise.tune.problem import Config, Problem

_UNIT_NS = 1.0e6
_ROUNDS = 3  # of the sweep, as many as a collector makes at least


def sweep(problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
    """The fastest of three rounds each, and how long all of it took."""
    start = time.perf_counter()
    family, rng = get_family(problem.family), np.random.default_rng(0)
    operands = family.operands(problem, rng)
    times: dict[Config, list[float]] = {config: [] for config in configs}
    with running_on(problem.threads):
        runs = {config: family.runner(problem, config, operands) for config in configs}
        rough = {config: nanoseconds(run, 1) for config, run in runs.items()}
        for _ in range(_ROUNDS):
            for index in rng.permutation(len(configs)):
                config = configs[index]
                calls = int(min(max(_UNIT_NS / rough[config], 1), 100))
                times[config].append(nanoseconds(runs[config], calls))
    return {config: min(taken) for config, taken in times.items()}, time.perf_counter() - start
