"""The collector on a CPU: one kernel after the other in this process.

It may be stopped or killed at any moment and started again: what is in the store counts, also of the kernel and of
the batch that were under way. A batch that was cut off has no second reading of its default; the next run takes one,
and its timings count if that agrees with the first. All configurations are checked against NumPy before any is timed.
A kernel that writes nothing must not pass with what another left in memory, so checks and timings have inputs of their
own, and a checked result is wiped.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tilewise._system import real_cores
from tilewise._wording import pluralize
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.profile.timing.limits import TimeIsUp, time_limit
from tilewise.store.aggregate import FIRST_FINAL_ROUND, MIN_FINAL_TIMINGS, contenders
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import Machine, Store, Verdict
from tilewise.tune.choose.tuned_table import machine_name
from tilewise.tune.families.cpu.family import Array, CpuFamily, Expected, get_family, is_right
from tilewise.tune.measure.collector import Collector, Options, Say
from tilewise.tune.measure.cpu.clock import CpuClock, describe, in_pieces, one_run, require_native, running_on
from tilewise.tune.measure.racing import best_few
from tilewise.tune.measure.resume import earlier_default, resume
from tilewise.tune.measure.sampling import Candidate, Settings, time_all, time_finals
from tilewise.tune.measure.schedule import Tally, pick_configs

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


# What a CPU's collection differs in from a GPU's.
cpu_options = functools.partial(Options, max_configs=80, settings=CPU_SETTINGS)
_Operands = tuple[Mapping[str, Array], Expected]


class CpuCollector(Collector):
    """One run on this CPU."""

    limit_seconds = 20.0  # for one configuration to be checked

    def __init__(self, kernels: Iterable[Kernel], store: Store, options: Options, say: Say = print) -> None:
        machine = Machine("cpu", machine_name(require_native()), {})
        super().__init__(_feasible(kernels, say), store, options, machine, say)

    def begin(self) -> Machine:
        """Open a run of this machine in the store."""
        details = describe(measure=self.options.minutes >= _WORTH_CEILINGS)
        machine = Machine("cpu", details["name"], details)
        self.open_run(machine)
        return machine

    def run(self) -> dict[str, Tally]:
        name = self.begin().identity
        self.say(f"{len(self.kernels)} of {pluralize(len(self.wanted), 'kernel')} to measure on {name}")
        for number, kernel in enumerate(self.kernels, start=1):
            if not self.time_left():
                break
            if self.claims(kernel):
                self.measure(kernel)
                self.tell(number, len(self.kernels))
        return dict(self.tallies)

    def measure(self, kernel: Kernel) -> None:
        """Measure a kernel that was claimed. What one family does wrong must not end the collection; what the store or
        the user say does."""
        try:
            self._measure(kernel)
        except TilewiseError:
            raise
        except Exception as error:
            self.give_up(kernel, f"{type(error).__name__}: {error}")

    def _measure(self, kernel: Kernel) -> None:
        """Check, time, and mark as finished; a stop in between leaves what was timed so far."""
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
            whole = self._time(kernel, candidates, CpuClock(threads), self.options.seed + digest)
        if not whole:
            self.store.release(kernel)
        elif self._too_disturbed(kernel, candidates):
            self.say(f"{kernel.name}: something else keeps this machine busy; it will be measured again")
        else:
            self.finish(kernel, configs[0], time.monotonic() - start)
        self.tally(kernel).seconds += time.monotonic() - start

    def _time(self, kernel: Kernel, candidates: Sequence[Candidate], clock: CpuClock, seed: int) -> bool:
        settings, batches, recorder = self.options.settings, self.store.batches(kernel), self.recorder(kernel)
        resume(clock, settings, candidates, batches, recorder)
        if self.options.finals:
            usual_ns = earlier_default(batches)
            return time_finals(clock, settings, candidates, seed, recorder, self.time_left, usual_ns)
        return time_all(clock, settings, candidates, seed, recorder, self.time_left)

    def _configs(self, family: CpuFamily, kernel: Kernel, seed: int) -> list[Config]:
        """What to measure, the default first."""
        if self.options.finals:
            return contenders(self.store, kernel, self.options.settings.finalists)
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
        self.add_verdicts(kernel, verdicts)
        return kept if kept and verdicts[0].status == "ok" else []

    def _operands(self, family: CpuFamily, kernel: Kernel, rng: np.random.Generator) -> _Operands:
        values = family.operands(kernel.problem, rng)
        return values, family.expected(kernel.problem, values)

    def _try(
        self, family: CpuFamily, kernel: Kernel, config: Config, index: int, sets: Sequence[_Operands]
    ) -> tuple[Verdict, Candidate | None]:
        try:
            with time_limit(self.limit_seconds):
                return self._check_one(family, kernel, config, index, sets)
        except TimeIsUp:
            return Verdict(config, "failed", f"it did not end within {self.limit_seconds:g} s"), None
        except Exception as error:  # a family may raise anything; it is this configuration's verdict
            return Verdict(config, "failed", f"{type(error).__name__}: {error}"[:300]), None

    def _check_one(
        self, family: CpuFamily, kernel: Kernel, config: Config, index: int, sets: Sequence[_Operands]
    ) -> tuple[Verdict, Candidate | None]:
        (for_timing, _), (for_checking, expected) = sets
        result = family.runner(kernel.problem, config, for_checking)()
        right = is_right(result, expected)
        result.fill(np.nan if result.dtype.kind == "f" else np.iinfo(result.dtype).max)
        if not right:
            return Verdict(config, "wrong", "the result differs from NumPy's"), None
        timed = family.runner(kernel.problem, config, for_timing)
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
            each = max(1, round(wanted / pieces))
            candidate.unit = functools.partial(in_pieces, candidate.runs[0], pieces, each)
            candidate.launches = pieces * each

    def _too_disturbed(self, kernel: Kernel, candidates: Sequence[Candidate]) -> bool:
        """Whether half of the configurations still lack two undisturbed timings; in the finals, the best of them."""
        finals = self.options.finals
        clean: Counter[str] = Counter()
        for batch in self.store.batches(kernel):
            if not batch.disturbed and (not finals or batch.round >= FIRST_FINAL_ROUND):
                clean.update(batch.runtime_ns.keys())
        if finals:
            few = best_few(candidates[1:], candidates[0], self.options.settings.finalists)
            return sum(clean[candidate.config.key] >= 2 * MIN_FINAL_TIMINGS for candidate in few) * 2 < len(few)
        return sum(clean[candidate.config.key] >= 2 for candidate in candidates[1:]) * 2 < len(candidates) - 1


def _feasible(kernels: Iterable[Kernel], say: Say) -> list[Kernel]:
    """Those that want no more threads than there are cores."""
    given, cores = list(kernels), real_cores()
    kept = [kernel for kernel in given if kernel.problem.threads <= cores]
    if given and not kept:
        raise ConfigurationError(f"All of these kernels want more threads than the {cores} cores of this machine.")
    if len(kept) < len(given):
        say(f"{pluralize(len(given) - len(kept), 'kernel')} left out: more threads than the {cores} cores")
    return kept
