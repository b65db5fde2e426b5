"""The CPU collector: one kernel after the other in this process, every timing in the store as soon as it is taken.

It may be stopped or killed at any moment and started again: what is in the store counts, also of the kernel and of
the batch that were under way. A batch that was cut off has no second reading of its default; the next run takes one,
and its timings count if that agrees with the first. All configurations are checked against NumPy before any is timed.
A kernel that writes nothing must not pass with what another left in memory, so checks and timings have inputs of their
own, and a checked result is wiped.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewise._system import real_cores
from tilewise._wording import counted
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.tune.choose.kept import machine_name
from tilewise.tune.families.cpu.family import Array, CpuFamily, Expected, get_family
from tilewise.tune.measure.aggregate import contenders
from tilewise.tune.measure.cpu.clock import CpuClock, Pieces, describe, require_native, running_on
from tilewise.tune.measure.cpu.limit import TookTooLongError, within
from tilewise.tune.measure.racing import FIRST_FINAL, LEAST, best_few
from tilewise.tune.measure.resume import earlier_default, resume
from tilewise.tune.measure.sampling import Batch, Candidate, Run, Settings, Verdict, scatter, time_all, time_finals
from tilewise.tune.measure.schedule import Tally, balanced, claim, pick_configs, summary, unfinished
from tilewise.tune.measure.store import BatchRow, Machine, Store, VerdictRow
from tilewise.tune.problem import Config, Kernel

CPU_SETTINGS = Settings(
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
_NEAR = 0.4  # of the configurations, those next to the default
_LEAST_CONFIGS = 28
_PIECE_NS, _MOST_PIECES = 40_000, 12  # long enough for the clock; more find no quieter moment
_WORTH_CEILINGS = 1.0  # minutes; a shorter collection does not spend seconds on the machine's ceilings


@dataclass
class CpuOptions:
    """For how long, and how many configurations a kernel."""

    minutes: float = 8.0
    seed: int = 0
    max_configs: int = 80  # 0: all
    finals: bool = False  # only those, of kernels that are finished and have had none
    settings: Settings = field(default_factory=lambda: CPU_SETTINGS)


@dataclass
class _Operands:
    values: Mapping[str, Array]
    expected: Expected


class CpuCollector:
    """One run of the collector; the measurements are in the store."""

    limit_seconds = 20.0  # for one configuration to be checked

    def __init__(
        self, kernels: Iterable[Kernel], store: Store, options: CpuOptions, say: Callable[[str], None] = print
    ) -> None:
        require_native()
        self.store, self.options, self.say = store, options, say
        self.progress: Callable[[int, int, str], None] | None = None
        self.store.choose_part(Machine("cpu", machine_name(require_native()), {}))
        self.wanted = self._feasible(kernels)
        self.waiting = balanced(unfinished(self.wanted, store, options.finals), options.seed)
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.started = time.monotonic()
        self.deadline = self.started + options.minutes * 60
        self.run_number = 0
        self._said = self.started

    def _feasible(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """Those that want no more threads than there are cores."""
        given, cores = list(kernels), real_cores()
        kept = [kernel for kernel in given if _threads(kernel) <= cores]
        if given and not kept:
            raise ConfigurationError(f"All of these kernels want more threads than the {cores} cores of this machine.")
        if len(kept) < len(given):
            self.say(f"{counted(len(given) - len(kept), 'kernel')} left out: more threads than the {cores} cores")
        return kept

    def begin(self) -> Machine:
        """Open a run of this machine in the store."""
        details = describe(measure=self.options.minutes >= _WORTH_CEILINGS)
        settings = {**dataclasses.asdict(self.options.settings), "max_configs": self.options.max_configs}
        machine = Machine("cpu", details["name"], details)
        self.run_number = self.store.begin(machine, self.options.seed, settings)
        return machine

    def run(self) -> dict[str, Tally]:
        name = self.begin().identity
        self.say(f"{len(self.waiting)} of {counted(len(self.wanted), 'kernel')} to measure on {name}")
        for number, kernel in enumerate(self.waiting, start=1):
            if not self._time_left():
                break
            if claim(self.store, self.run_number, kernel, self.options.finals):
                self.measure(kernel)
                self._tell(number)
        return dict(self.tallies)

    def _tell(self, number: int) -> None:
        if self.progress is not None:
            self.progress(number, len(self.waiting), summary(self.tallies))
            return
        now = time.monotonic()
        if now - self._said > 10 or number == len(self.waiting):
            self._said = now
            wait = len(self.waiting) - number
            self.say(f"{now - self.started:5.0f} s: {summary(self.tallies)}; {wait} to go")

    def _time_left(self) -> bool:
        return time.monotonic() < self.deadline

    def measure(self, kernel: Kernel) -> None:
        """Measure a kernel that was claimed. What one family does wrong must not end the collection; what the store or
        the user say does."""
        try:
            self._measure(kernel)
        except TilewiseError:
            raise
        except Exception as error:
            failure = f"{kernel.name}: {type(error).__name__}: {error}"[:300]
            self.tallies[kernel.problem.family].failures.append(failure)
            self.store.release(kernel)

    def _measure(self, kernel: Kernel) -> None:
        """Check, time, and mark as finished; a stop in between leaves what was timed so far."""
        start = time.monotonic()
        family = get_family(kernel.problem.family)
        tally = self.tallies[kernel.problem.family]
        digest = int(kernel.problem.digest[:8], 16)
        threads = _threads(kernel)
        with running_on(threads):
            configs = self._configs(family, kernel, digest)
            candidates = self._check(family, kernel, configs, digest)
            if not candidates or candidates[0].config != configs[0]:
                tally.failures.append(f"{kernel.name}: the default configuration is not right")
                self.store.release(kernel)
                return
            clock = CpuClock(threads)
            self._make_units(candidates)
            recorder = _Recorder(self.store, self.run_number, kernel, tally)
            whole = self._time(kernel, candidates, clock, recorder, self.options.seed + digest)
        if whole and self._too_disturbed(kernel, candidates):
            self.say(f"{kernel.name}: something else keeps this machine busy; it will be measured again")
        elif whole:
            self.store.finish(self.run_number, kernel, configs[0], time.monotonic() - start)
            taken = [c.final if self.options.finals else c.times for c in candidates[1:]]
            repeats = [times for times in taken if len(times) > 1]
            tally.kernels += 1
            tally.pairs += len(repeats) + 1
            tally.scatter += [scatter(times) for times in repeats]
        if not whole:
            self.store.release(kernel)
        tally.seconds += time.monotonic() - start

    def _time(
        self, kernel: Kernel, candidates: Sequence[Candidate], clock: CpuClock, recorder: _Recorder, seed: int
    ) -> bool:
        settings, batches = self.options.settings, self.store.batches(kernel)
        resume(clock, settings, candidates, batches, recorder.judge)
        if self.options.finals:
            usual_ns = earlier_default(batches)
            return time_finals(clock, settings, candidates, seed, recorder, self._time_left, usual_ns)
        return time_all(clock, settings, candidates, seed, recorder, self._time_left)

    def _configs(self, family: CpuFamily, kernel: Kernel, seed: int) -> list[Config]:
        """What to measure, the default first."""
        if self.options.finals:
            return contenders(self.store, kernel, self.options.settings)
        every = family.configs(kernel.problem)
        return pick_configs(every, self._count(family, kernel, every[0]), seed, near=_NEAR)

    def _count(self, family: CpuFamily, kernel: Kernel, default: Config) -> int:
        """Configurations to measure: as many as are asked for, fewer of a kernel that takes long, never a handful."""
        settings, most = self.options.settings, self.options.max_configs
        if not most or not settings.kernel_seconds:
            return most
        run = family.runner(kernel.problem, default, family.operands(kernel.problem, np.random.default_rng(0)))
        seconds = max(min(one_run(run), one_run(run)) * 1e-9, settings.unit_ms * 1e-3)
        return min(most, max(_LEAST_CONFIGS, int(settings.kernel_seconds / (settings.rounds * seconds))))

    def _check(self, family: CpuFamily, kernel: Kernel, configs: Sequence[Config], seed: int) -> list[Candidate]:
        """Run every configuration and compare; estimate what one run takes from a second one."""
        rng = np.random.default_rng(seed)
        sets = [self._operands(family, kernel, rng) for _ in range(2)]
        verdicts, kept = [], []
        for index, config in enumerate(configs):
            verdict, candidate = self._try(family, kernel, config, index, sets)
            verdicts.append(verdict)
            if candidate is not None and (verdict.status == "ok" or index == 0):
                kept.append(candidate)
        rows = [VerdictRow(v.config, v.status, v.reason) for v in verdicts]
        self.store.add_verdicts(self.run_number, kernel, rows)
        tally = self.tallies[kernel.problem.family]
        tally.verdicts.update(row.status for row in rows)
        bad = [row for row in rows if row.status in ("wrong", "failed")]
        tally.failures += [f"{r.status}: {kernel.problem.key} {r.config.key}: {r.reason}" for r in bad[:5]]
        return kept if kept and verdicts[0].status == "ok" else []

    def _operands(self, family: CpuFamily, kernel: Kernel, rng: np.random.Generator) -> _Operands:
        values = family.operands(kernel.problem, rng)
        return _Operands(values, family.expected(kernel.problem, values))

    def _try(
        self, family: CpuFamily, kernel: Kernel, config: Config, index: int, sets: Sequence[_Operands]
    ) -> tuple[Verdict, Candidate | None]:
        try:
            with within(self.limit_seconds):
                return self._check_one(family, kernel, config, index, sets)
        except TookTooLongError as error:
            return Verdict(config, "failed", str(error)), None
        except Exception as error:  # a family may raise anything; it is this configuration's verdict
            return Verdict(config, "failed", f"{type(error).__name__}: {error}"[:300]), None

    def _check_one(
        self, family: CpuFamily, kernel: Kernel, config: Config, index: int, sets: Sequence[_Operands]
    ) -> tuple[Verdict, Candidate | None]:
        for_timing, for_checking = sets
        result = family.runner(kernel.problem, config, for_checking.values)()
        right = _is_right(result, for_checking.expected)
        result.fill(np.nan if result.dtype.kind == "f" else np.iinfo(result.dtype).max)
        if not right:
            return Verdict(config, "wrong", "the result differs from NumPy's"), None
        timed = family.runner(kernel.problem, config, for_timing.values)
        estimate_ns = min(one_run(timed), one_run(timed))
        if estimate_ns > self.options.settings.slowest_ms * 1e6 and index:
            return Verdict(config, "slow", f"one run took {estimate_ns / 1e6:.1f} ms"), None
        return Verdict(config, "ok"), Candidate(index, config, [timed], estimate_ns)

    def _make_units(self, candidates: Sequence[Candidate]) -> None:
        settings = self.options.settings
        unit_ns = settings.unit_ms * 1e6
        # As many for all, so that nobody has more tries than another to meet a quiet moment.
        pieces = min(max(round(unit_ns / max(candidates[0].estimate_ns, _PIECE_NS)), 1), _MOST_PIECES)
        for candidate in candidates:
            wanted = min(round(unit_ns / candidate.estimate_ns), settings.max_launches)
            candidate.unit = unit = Pieces(candidate.runs[0], pieces, max(1, round(wanted / pieces)))
            candidate.launches = unit.launches

    def _too_disturbed(self, kernel: Kernel, candidates: Sequence[Candidate]) -> bool:
        """Whether half of the configurations still lack two undisturbed timings; in the finals, the best of them."""
        finals = self.options.finals
        clean: Counter[str] = Counter()
        for batch in self.store.batches(kernel):
            if not batch.disturbed and (not finals or batch.round >= FIRST_FINAL):
                clean.update(batch.runtime_ns.keys())
        if finals:
            few = best_few(candidates[1:], candidates[0], self.options.settings.finalists)
            return sum(clean[candidate.config.key] >= 2 * LEAST for candidate in few) * 2 < len(few)
        return sum(clean[candidate.config.key] >= 2 for candidate in candidates[1:]) * 2 < len(candidates) - 1


class _Recorder:
    """Writes one kernel's timings to the store as they come."""

    def __init__(self, store: Store, run: int, kernel: Kernel, tally: Tally) -> None:
        self.store, self.run, self.kernel, self.tally = store, run, kernel, tally
        self._batch = 0

    def begin(self, number: int, default_ns: float) -> None:
        self._batch = self.store.open_batch(self.run, self.kernel, number, default_ns)

    def add(self, candidate: Candidate, runtime_ns: float) -> None:
        self.store.add_timing(self._batch, candidate.config, runtime_ns)

    def close(self, batch: Batch) -> None:
        self.store.close_batch(self._batch, batch.default_ns, disturbed=batch.disturbed, watch=batch.watch)
        self.tally.batches += 1
        self.tally.disturbed += batch.disturbed

    def judge(self, batch: BatchRow, moved: bool) -> None:
        self.store.close_batch(batch.number, batch.default_ns, disturbed=moved, watch={"resumed": 1})


def _threads(kernel: Kernel) -> int:
    return kernel.problem.size("threads") if "threads" in kernel.problem else 1


def _is_right(result: Array, expected: Expected) -> bool:
    if result.shape != expected.value.shape:
        return False
    distance = np.abs(result - expected.value)
    return bool((distance <= expected.bound).all())  # a NaN is not within any bound


def one_run(run: Run) -> float:
    """Nanoseconds of a single run, roughly."""
    start = time.perf_counter_ns()
    run()
    return max(float(time.perf_counter_ns() - start), 500.0)
