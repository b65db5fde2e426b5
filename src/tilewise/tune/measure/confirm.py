"""Confirmation of a tuned choice: time it and the default again, interleaved, on fresh data and in other processes.

The search keeps the fastest of several noisy readings, and the fastest is often a lucky one. Nothing is kept before it
wins again. Each process draws operands, times the choice and the default in alternation and returns the median ratio.
The interval comes from the signed-rank test over the processes. Ratios within one process are correlated, because they
share memory addresses and a moment of the machine: for eight recorded products at a load of 8, 95 % intervals over nine
sets in one process contained the ratio of a quiet machine in 60 % of the cases, over seven processes in 85 %. The
processes are started once and confirm every choice of the device.

Each request and each reply is one line of JSON on standard input and output.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.profile.timing.statistics import signed_rank_test
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.cpu.family import get_family, require_native
from tilewise.tune.measure.cpu.clock import CpuClock, one_run, running_on, time_in_pieces
from tilewise.tune.measure.sampling import TimingSettings

SETS = 7  # sets of operands, each in a process; with fewer than 6, a signed-rank interval cannot reach 95 %
_PAIRS, _SLOW_PAIRS = 11, 3  # readings of each configuration on a set; odd, for the median
_UNIT_NS, _SLOW_NS = 4.0e5, 2.0e7  # length of a reading; longer ones get fewer pairs; arbitrary
_MAX_CALLS = 200  # per reading; arbitrary


@dataclass(frozen=True)
class ConfirmedGain:
    """Time of the default divided by that of the choice, with a 95 % confidence interval.

    `elsewhere` is the share of the time in which other programs had the CPU, or by which the default's readings vary.
    """

    ratio: float
    low: float
    high: float
    elsewhere: float = 0.0

    @property
    def excludes_zero(self) -> bool:
        """Whether the choice is faster than the default with 95 % confidence."""
        return self.low > 1.0

    @property
    def on_busy_machine(self) -> bool:
        """Whether other programs used more CPU than a collector tolerates."""
        return self.elsewhere > TimingSettings.disturbed

    def __str__(self) -> str:
        return f"{self.ratio:.3f}x ({self.low:.3f} to {self.high:.3f})"


def gain_of(log_ratios: Sequence[float], elsewhere: float = 0.0) -> ConfirmedGain:
    """Estimate the gain from independent values of log(default / choice); `elsewhere` is other programs' CPU share."""
    test = signed_rank_test(np.asarray(log_ratios, np.float64), permutations=1)  # its p-value is not used
    low, high = math.exp(test.interval.low), math.exp(test.interval.high)
    return ConfirmedGain(math.exp(test.centre), low, high, elsewhere)


TimedSet = tuple[list[float], list[float], dict[str, float]]  # ns of the default, of the choice; measure of other load


def confirm(problem: Problem, default: Config, config: Config, seed: int = 1) -> ConfirmedGain:
    """Time a configuration against the default on new random operands, in the current process."""
    return _gain_of_sets([_time_one(problem, default, config, seed, index) for index in range(SETS)])


def _time_one(problem: Problem, default: Config, config: Config, seed: int, index: int) -> TimedSet:
    """Draw set number `index` of the operands and time both configurations on it."""
    with running_on(problem.threads):
        return _time_set(problem, default, config, np.random.default_rng([seed, SETS, index]))


def _time_set(problem: Problem, default: Config, config: Config, rng: np.random.Generator) -> TimedSet:
    """Time the default and a configuration alternately on one set of operands.

    Returns the nanoseconds per call of the default, those of `config`, and the clock's measure of other load.
    """
    family = get_family(problem.family)
    operands = family.operands(problem, rng)
    runs = [family.runner(problem, each, operands) for each in (default, config)]
    rough_ns = [min(one_run(run), one_run(run)) for run in runs]
    calls = [int(min(max(_UNIT_NS / ns, 1), _MAX_CALLS)) for ns in rough_ns]
    pairs = _SLOW_PAIRS if max(rough_ns) > _SLOW_NS else _PAIRS
    clock = CpuClock(problem.threads)
    units = [functools.partial(time_in_pieces, run, 1, count) for run, count in zip(runs, calls, strict=True)]
    times = clock.time_units(units * pairs)
    per_call = [[ns / count for ns in times[start::2]] for start, count in enumerate(calls)]
    return per_call[0], per_call[1], clock.watch()


def _gain_of_sets(sets: Sequence[TimedSet]) -> ConfirmedGain:
    """Estimate the gain from timings on several operand sets: (default's ns, choice's ns, accounting of other load).

    With several threads the operating system's accounting says nothing about other programs. The median of the
    default's readings over their minimum then stands for it.
    """
    log_ratios = [
        statistics.median(math.log(a / b) for a, b in zip(default, choice, strict=True)) for default, choice, _ in sets
    ]
    elsewhere = statistics.median(report.get("elsewhere", 0.0) for _, _, report in sets)
    readings = [ns for default, _, _ in sets for ns in default]
    variation = statistics.median(readings) / min(readings) - 1
    return gain_of(log_ratios, elsewhere or variation)


class OtherProcesses:
    """Python processes that confirm choices, one set of operands each; started on demand, and again after an end."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def confirm(self, problem: Problem, default: Config, config: Config, seed: int) -> ConfirmedGain:
        """Confirm a choice in the processes, or in this one if that fails, as for families registered only here."""
        request = [require_native().isa(), seed, problem.key, default.key, config.key]
        try:
            sets = [self._ask(index, [*request, index]) for index in range(SETS)]
        except (OSError, ValueError):
            self.stop()
            sets = []
        timings = [each for each in sets if each is not None]
        return _gain_of_sets(timings) if len(timings) == SETS else confirm(problem, default, config, seed)

    def _ask(self, index: int, request: Sequence[str | int]) -> TimedSet | None:
        """Send a request to a process and return its timings; None if the process could not measure it."""
        process = self._processes.get(index)
        if process is None or process.poll() is not None:
            command = [sys.executable, "-m", "tilewise.tune.measure.confirm"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes[index] = process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        reply: TimedSet | None = json.loads(process.stdout.readline())
        return reply

    def stop(self) -> None:
        """Close the processes' inputs, at which they exit, and wait for them."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.communicate(timeout=10)
        self._processes.clear()


def serve(lines: Any, write: Any) -> None:
    """Main loop of another process: answer each request line with timings, or null if it cannot be measured."""
    for line in lines:
        try:
            isa, seed, problem, default, config, index = json.loads(line)
            require_native().set_isa(isa)
            reply = _time_one(Problem(json.loads(problem)), Config.parse(default), Config.parse(config), seed, index)
        except Exception:  # the parent measures this choice itself and reports the error
            reply = None
        write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    serve(sys.stdin, lambda line: print(line, end="", flush=True))
