"""Sweeps on this CPU: every configuration roughly, or beside the default."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.measure.cpu.clock import nanoseconds, running_on
from tilewise.tune.problem import Config, Problem

_UNIT_NS = 1.0e6
_BETWEEN = 4  # tiles between two runs of the default
_ROUNDS = 3  # of the sweep, as many as a collector makes at least
# Many short turns: what disturbs one contender then disturbs the others as well.
_TURN_NS = 3.0e5


def sweep(problem: Problem, configs: Sequence[Config]) -> tuple[dict[Config, float], float]:
    """The fastest of three rounds each, and how long all of it took."""
    start = time.perf_counter()
    runtimes = in_turns(problem, configs, _ROUNDS, _UNIT_NS)
    return {config: min(times) for config, times in runtimes.items()}, time.perf_counter() - start


def in_turns(problem: Problem, configs: Sequence[Config], rounds: int, unit_ns: float) -> dict[Config, list[float]]:
    family, rng = get_family(problem.family), np.random.default_rng(0)
    operands = family.operands(problem, rng)
    times: dict[Config, list[float]] = {config: [] for config in configs}
    with running_on(problem.threads):
        runs = {config: family.runner(problem, config, operands) for config in configs}
        rough = {config: nanoseconds(run, 1) for config, run in runs.items()}
        for _ in range(rounds):
            for index in rng.permutation(len(configs)):
                config = configs[index]
                calls = int(min(max(unit_ns / rough[config], 1), 100))
                times[config].append(nanoseconds(runs[config], calls))
    return times


def beside_default(
    problem: Problem, default: Config, tiles: Sequence[Config], seconds: float, rounds: tuple[int, int]
) -> dict[Config, list[float]]:
    """Runtimes over the default's, several of each tile: every few tiles the default runs again, and a tile counts
    against the two nearest, so that what slows all of them for a while does not decide. As many rounds as there is
    time for, between the two numbers; fewer tiles, if there is none for the least."""
    family, rng = get_family(problem.family), np.random.default_rng(0)
    operands = family.operands(problem, rng)
    with running_on(problem.threads):
        base = family.runner(problem, default, operands)
        once = min(nanoseconds(base, 1), nanoseconds(base, 1))
        calls = int(min(max(_TURN_NS / once, 1), 100))
        turn = 1.4e-9 * once * calls * (1 + 1 / _BETWEEN)
        tiles = tiles[: max(3, int(seconds / (turn * rounds[0])))]
        runs = [family.runner(problem, tile, operands) for tile in tiles]
        for run in runs:
            run()
        ratios: dict[Config, list[float]] = {tile: [] for tile in tiles}
        for _ in range(int(np.clip(seconds / (turn * max(1, len(tiles))), *rounds))):
            before, order = nanoseconds(base, calls), rng.permutation(len(tiles))
            for first in range(0, len(tiles), _BETWEEN):
                some = order[first : first + _BETWEEN]
                times = [nanoseconds(runs[index], calls) for index in some]
                after = nanoseconds(base, calls)
                for index, spent in zip(some, times, strict=True):
                    ratios[tiles[index]].append(2 * spent / (before + after))
                before = after
    return ratios
