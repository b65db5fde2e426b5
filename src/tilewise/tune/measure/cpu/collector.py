"""The collector of a CPU: measures one kernel after the other in this process.

It may be stopped or killed at any moment and started again; everything in the store counts, including the unfinished
kernel and batch (see `resume.py`). All configurations are checked against NumPy before any is timed. A kernel that
writes nothing must not pass because of another kernel's result in memory, so checks and timings have separate inputs,
and a checked result is overwritten.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise._system import real_cores
from tilewise._wording import pluralize
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.profile.timing.limits import TimeIsUp, time_limit
from tilewise.store.aggregate import FIRST_FINAL_ROUND, MIN_FINAL_TIMINGS, contenders
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store, Verdict
from tilewise.tune.choose.tuned_table import machine_name
from tilewise.tune.families.cpu.family import Array, CpuFamily, get_family, is_right, require_native
from tilewise.tune.families.registry import Expected
from tilewise.tune.measure.collector import Collector, Options, Say, Tally, pick_configs
from tilewise.tune.measure.cpu.clock import CpuClock, describe, one_run, running_on, time_in_pieces
from tilewise.tune.measure.sampling import (
    Candidate,
    TimingSettings,
    earlier_default,
    leaders,
    resume,
    time_all,
)

CPU_SETTINGS = TimingSettings(
    unit_ms=0.6,
    max_launches=400,
    rounds=5,
    max_rounds=6,
    batch_configs=20,
    scatter=0.05,
    disturbed=0.15,
    slowest_ms=60.0,
    heat=16,
    finalists=8,
    final_rounds=5,
    most_final_rounds=10,
    final_error=0.006,
    settle_ms=0.3,
    kernel_seconds=0.65,
)
_NEAR_SHARE = 0.4  # share of configurations that are neighbors of the default
_MIN_CONFIGS = 28  # per kernel, however slow it is; arbitrary
_PIECE_NS, _MAX_PIECES = 40_000, 12  # long enough for the clock; more pieces do not reduce the scatter
_MIN_MINUTES_FOR_CEILINGS = 1.0  # shorter collections do not spend seconds on measuring the machine's peak rates


# Defaults of a CPU collection.
cpu_options = functools.partial(Options, max_configs=80, settings=CPU_SETTINGS)
_Operands = tuple[Mapping[str, Array], Expected]

_RUNS = 5  # of each default; the fastest counts, since other programs may be running
_MEAN_SLOWDOWN = 1.25  # mean runtime of configurations relative to the default; an estimate, as are the following
_EXTRA_ROUNDS = 1.25  # rounds relative to the minimum number
_RECORDING_S = 1.5e-4  # writing a timing to the store
_OVERHEAD = 1.25  # readings of the default and disturbed batches


class CpuCollector(Collector):
    """One run of measurements on this CPU."""

    limit_seconds = 20.0  # limit for checking one configuration

    def __init__(self, kernels: Iterable[Kernel], store: Store, options: Options, say: Say = print) -> None:
        """Select the store's unfinished kernels that need at most as many threads as there are cores."""
        machine = Machine("cpu", machine_name(require_native()), {})
        requested, cores = list(kernels), real_cores()
        feasible = [kernel for kernel in requested if kernel.problem.threads <= cores]
        if requested and not feasible:
            raise ConfigurationError(f"All of these kernels need more threads than the {cores} cores of this machine.")
        if len(feasible) < len(requested):
            say(f"{pluralize(len(requested) - len(feasible), 'kernel')} left out: more threads than the {cores} cores")
        super().__init__(feasible, store, options, machine, say)

    def begin(self) -> Machine:
        """Record the start of a measurement run in the store; return the description of this machine."""
        details = describe(measure=self.options.minutes >= _MIN_MINUTES_FOR_CEILINGS)
        machine = Machine("cpu", details["name"], details)
        self.open_run(machine)
        return machine

    def run(self) -> dict[str, Tally]:
        """Measure kernels until all are finished or time is up."""
        name = self.begin().identity
        self.say(f"{len(self.kernels)} of {pluralize(len(self.requested), 'kernel')} to measure on {name}")
        for number, kernel in enumerate(self.kernels, start=1):
            if not self.time_left():
                break
            if self.claims(kernel):
                self.measure(kernel)
                self.report_progress(number, len(self.kernels))
        return dict(self.tallies)

    def measure(self, kernel: Kernel) -> None:
        """Measure a claimed kernel; an error in its family gives up this kernel, an error of the store ends the run."""
        try:
            self._measure(kernel)
        except TilewiseError:
            raise
        except Exception as error:
            self.give_up(kernel, f"{type(error).__name__}: {error}")

    def _measure(self, kernel: Kernel) -> None:
        """Check, time and finish a kernel; if it is stopped early, its timings remain in the store."""
        start = time.monotonic()
        family = get_family(kernel.problem.family)
        digest = int(kernel.problem.digest[:8], 16)
        threads = kernel.problem.threads
        with running_on(threads):
            configs = self._configs(family, kernel, digest)
            candidates = self._check(family, kernel, configs, digest)
            if not candidates or candidates[0].config != configs[0]:
                self.give_up(kernel, "the default configuration is not right")
                return
            self._make_units(candidates)
            is_complete = self._time(kernel, candidates, CpuClock(threads), self.options.seed + digest)
        if not is_complete:
            self.store.release(kernel)
        elif self._too_disturbed(kernel, candidates):
            self.say(f"{kernel.name}: something else keeps this machine busy; it will be measured again")
        else:
            self.finish(kernel, configs[0], time.monotonic() - start)
        self.tally(kernel).seconds += time.monotonic() - start

    def _time(self, kernel: Kernel, candidates: Sequence[Candidate], clock: CpuClock, seed: int) -> bool:
        """Time the candidates, continuing an interrupted run's timings; False if time is up."""
        settings, batches, recorder = self.options.settings, self.store.batches(kernel), self.recorder(kernel)
        resume(clock, settings, candidates, batches, recorder)
        finals, usual_ns = self.options.finals, earlier_default(batches) if self.options.finals else None
        return time_all(
            clock, settings, candidates, seed, recorder, self.time_left, finals_only=finals, usual_ns=usual_ns
        )

    def _configs(self, family: CpuFamily, kernel: Kernel, seed: int) -> list[Config]:
        """List the configurations of a kernel to measure, the default first, the others drawn with `seed`."""
        if self.options.finals:
            return contenders(self.store, kernel, self.options.settings.finalists)
        all_configs = family.configs(kernel.problem)
        return pick_configs(all_configs, self._config_count(family, kernel, all_configs[0]), seed, near=_NEAR_SHARE)

    def _config_count(self, family: CpuFamily, kernel: Kernel, default: Config) -> int:
        """Return how many configurations to measure: fewer for slow kernels, at least `_MIN_CONFIGS`."""
        settings, max_configs = self.options.settings, self.options.max_configs
        if not max_configs or not settings.kernel_seconds:
            return max_configs
        run = family.runner(kernel.problem, default, family.operands(kernel.problem, np.random.default_rng(0)))
        seconds = max(min(one_run(run), one_run(run)) * 1e-9, settings.unit_ms * 1e-3)
        return min(max_configs, max(_MIN_CONFIGS, int(settings.kernel_seconds / (settings.rounds * seconds))))

    def _check(self, family: CpuFamily, kernel: Kernel, configs: Sequence[Config], seed: int) -> list[Candidate]:
        """Run every configuration with a time limit, and return the correct ones with an estimate of their time.

        The verdicts on all of them are stored. The list is empty if the default, the first configuration, is not
        correct.
        """
        rng = np.random.default_rng(seed)
        operand_sets = [family.operands(kernel.problem, rng) for _ in range(2)]
        sets = [(operands, family.expected(kernel.problem, operands)) for operands in operand_sets]
        verdicts, candidates = [], []
        for index, config in enumerate(configs):
            candidate = None
            try:
                with time_limit(self.limit_seconds):
                    verdict, candidate = self._check_one(family, kernel, config, index, sets)
            except TimeIsUp:
                verdict = Verdict(config, "failed", f"it did not end within {self.limit_seconds:g} s")
            except Exception as error:  # a family may raise anything; it is this configuration's verdict
                verdict = Verdict(config, "failed", f"{type(error).__name__}: {error}"[:300])
            verdicts.append(verdict)
            if candidate is not None and (verdict.status == "ok" or index == 0):
                candidates.append(candidate)
        self.add_verdicts(kernel, verdicts)
        return candidates if candidates and verdicts[0].status == "ok" else []

    def _check_one(
        self, family: CpuFamily, kernel: Kernel, config: Config, index: int, sets: Sequence[_Operands]
    ) -> tuple[Verdict, Candidate | None]:
        """Check a configuration's result against NumPy's and estimate its time; (verdict, candidate or None)."""
        (for_timing, _), (for_checking, expected) = sets
        result = family.runner(kernel.problem, config, for_checking)()
        right = is_right(result, expected)
        result.fill(np.nan if result.dtype.kind == "f" else np.iinfo(result.dtype).max)
        if not right:
            return Verdict(config, "wrong", "the result differs from NumPy's"), None
        run = family.runner(kernel.problem, config, for_timing)
        estimate_ns = min(one_run(run), one_run(run))
        if estimate_ns > self.options.settings.slowest_ms * 1e6 and index:
            return Verdict(config, "slow", f"one run took {estimate_ns / 1e6:.1f} ms"), None
        return Verdict(config, "ok"), Candidate(index, config, [run], estimate_ns)

    def _make_units(self, candidates: Sequence[Candidate]) -> None:
        """Set each candidate's timed unit: several pieces of calls, about `unit_ms` in all."""
        settings = self.options.settings
        unit_ns = settings.unit_ms * 1e6
        # All have the same number of pieces: more pieces would give a lower minimum.
        pieces = min(max(round(unit_ns / max(candidates[0].estimate_ns, _PIECE_NS)), 1), _MAX_PIECES)
        for candidate in candidates:
            launches = min(round(unit_ns / candidate.estimate_ns), settings.max_launches)
            each = max(1, round(launches / pieces))
            candidate.unit = functools.partial(time_in_pieces, candidate.runs[0], pieces, each)
            candidate.launches = pieces * each

    def _too_disturbed(self, kernel: Kernel, candidates: Sequence[Candidate]) -> bool:
        """Tell whether more than half of the configurations (or finalists) lack undisturbed timings."""
        finals, compared, required = self.options.finals, candidates[1:], 2
        if finals:
            compared = leaders(compared, candidates[0], self.options.settings.finalists)
            required = 2 * MIN_FINAL_TIMINGS
        clean: Counter[str] = Counter()
        for batch in self.store.batches(kernel):
            if not batch.disturbed and (not finals or batch.round >= FIRST_FINAL_ROUND):
                clean.update(batch.runtime_ns.keys())
        return sum(clean[candidate.config.key] >= required for candidate in compared) * 2 < len(compared)


def plan(kernels: Iterable[Kernel], options: Options) -> list[dict[str, Any]]:
    """Return a row per family and thread count: numbers of kernels and configurations, and estimated seconds."""
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
    """Return the number of configurations to measure for a problem, and the seconds this takes."""
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
