"""`Tuner`: the best configuration of a problem on this machine, with as few measurements as it takes to be sure.

It looks into its cache, asks the cost model, measures what looks best, corrects the model by what it measures, and
stops when nothing unmeasured is likely to pay. Every measurement is kept in a store and teaches the shapes that come
after; every choice is kept in a file that other processes read.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError
from tilewise.tune.choose.cache import Choice, Choices, cache_folder
from tilewise.tune.choose.scores import Guide, Recollection, file_guide, shape_fields, shipped_guide
from tilewise.tune.families.space import space_of
from tilewise.tune.measure.export import Described
from tilewise.tune.measure.store import Machine, Store, VerdictRow
from tilewise.tune.measure.trial import SideBySide, Timed, Trial
from tilewise.tune.problem import Config, Kernel, Problem, Value
from tilewise.tune.search.gaussian_process import Belief, Memory, Numbers, Prior
from tilewise.tune.search.loop import Rule, Step, search, settle

if TYPE_CHECKING:
    from tilewise.tune.choose.calibration.calibrated import Calibrated

PROGRAM = "tuned"
_CLOSE, _FAR = 0.02, 0.05  # in logarithms: contenders that a reading does not tell apart, on a CPU and on a GPU
_LUCK = 0.01  # as much may be between two readings on a CPU
_WORTH = 0.005  # less than this over the default is not told from noise
_CALIBRATED_PRIOR = Prior(slope=1.0, slope_error=0.3, spread=0.05, length=1.0, own=0.03, noise=0.015)
_WAIT_SECONDS = 120.0  # for another process that tunes the same problem


@dataclass(frozen=True)
class Tuned:
    """A choice and where it came from: "cache", "measured", "calibrated" or "model" (not measured), or "default"."""

    problem: Problem
    config: Config
    source: str
    runtime_ns: float | None = None
    default_ns: float | None = None
    measurements: int = 0
    sure: bool = False
    seconds: float = 0.0
    reason: str = ""
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """Over the default configuration, where both were measured."""
        return self.default_ns / self.runtime_ns if self.runtime_ns and self.default_ns else None


class Bench(Protocol):
    """A machine to tune on: the CPU, or a GPU through Triton."""

    kind: str
    machine: Machine
    version: str  # what a choice depends on beside the machine
    collection: str | None  # whose model fits this machine
    margin: float  # expected gains over the default below it are the model's noise

    def family(self, name: str) -> Described: ...
    def problem(self, spec: Mapping[str, Value]) -> Problem: ...
    def configs(self, problem: Problem) -> Sequence[Config]:
        """Every feasible configuration, the default first."""

    def default(self, problem: Problem) -> Config:
        """The first of `configs`."""

    def first_choice(self, problem: Problem, guide: Guide) -> tuple[bool, Config | None]:
        """Whether there is a shorter way than ranking all to what to take unmeasured; and what: None, the default."""

    def start(self, problem: Problem, configs: Sequence[Config]) -> tuple[Numbers, Prior] | None:
        """Scores to start measuring from where no model knows this machine, and how far to trust them."""

    def elsewhere(self, problem: Problem, config: Config) -> list[tuple[Problem, Config]]:
        """Other problems that a choice would be used for, as it would be used there."""

    def opinion(self, problem: Problem, configs: Sequence[Config]) -> tuple[Numbers, Prior] | None:
        """Scores to start measuring from, and how far to trust them, where there are better than a ranking's."""

    def trial(self, problem: Problem, default: Config) -> contextlib.AbstractContextManager[Trial]: ...
    def forget(self) -> None:
        """As if nothing had ever been compiled."""


class Tuner:
    """Tunes problems of one machine, "cpu" or "triton".

    `cache` is the folder of choices and measurements (default: the user's cache folder); `model` a model file in place
    of the shipped one; `budget` the most configurations measured a problem; `limit_s` measures in a process of its own
    that a configuration may crash, or hang for so many seconds. With `learn` the model is fine-tuned on what was
    measured here (needs PyTorch).

    >>> Tuner().tune({"family": "matmul", "m": 512, "n": 4096, "k": 1024}).config  # doctest: +SKIP
    """

    def __init__(
        self,
        device: str | Bench = "cpu",
        *,
        model: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        budget: int | None = None,
        limit_s: float | None = None,
        learn: bool = False,
        calibrated: Calibrated | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if budget is not None and budget < 1:
            raise ConfigurationError(f"budget must be at least 1 measurement, not {budget}.")
        self.bench = open_bench(device, limit_s) if isinstance(device, str) else device
        self.folder = Path(cache).expanduser() if cache is not None else cache_folder()
        self.budget, self.learn, self._said = budget, learn, say
        self._notes: set[str] = set()
        self._own_model = model is not None  # then it decides alone
        self.guide = self._guide(model)
        self.choices = Choices(self.folder, self.bench.machine.identity, self.bench.version)
        self.calibrated = calibrated if calibrated is not None else self._calibrated()
        self._recollections: dict[str, tuple[list[int], Recollection]] = {}  # by family; when the store was as they say
        self._tell([*self.guide.notes, *self.choices.notes])

    def _guide(self, model: str | os.PathLike[str] | None) -> Guide:
        if model is not None:
            return file_guide(Path(model))
        if self.learn and self.learned_file.is_file():
            return file_guide(self.learned_file)
        return shipped_guide(self.bench.collection, self.bench.machine.identity)

    def _calibrated(self) -> Calibrated | None:
        """This machine's calibration, where `tilewise calibrate` made one; a model of one's own decides without it."""
        if self.bench.kind != "cpu" or self._own_model or not any(self.folder.glob("calibration-*.safetensors")):
            return None
        from tilewise._extension import native
        from tilewise.tune.choose.calibration.calibrated import find_calibration, model_scores

        found, notes = find_calibration(native, self.folder, model_scores())
        self._tell(notes)
        return found

    @property
    def _stem(self) -> str:
        identity = hashlib.sha256(self.bench.machine.identity.encode()).hexdigest()[:12]
        return f"{self.bench.kind}-{identity}"

    @property
    def store_file(self) -> Path:
        """Every measurement ever made on this machine by the tuner."""
        return self.folder / f"{self._stem}.sqlite"

    @property
    def learned_file(self) -> Path:
        """The model that `learn` made of them."""
        return self.folder / f"{self._stem}.safetensors"

    def _tell(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line not in self._notes:
                self._notes.add(line)
                self._said(line)

    # Choosing

    def problem(self, spec: Problem | Mapping[str, Value]) -> Problem:
        return spec if isinstance(spec, Problem) else self.bench.problem(spec)

    def choose(self, spec: Problem | Mapping[str, Value]) -> Tuned:
        """The choice without measuring anything: cached, else the model's, else the default."""
        problem, start = self.problem(spec), time.perf_counter()
        kept = self.choices.get(problem, lambda config: config in self.bench.configs(problem))
        if kept is not None:
            return self._from_cache(kept, start)
        if self.calibrated is not None and self.calibrated.covers(problem.family):
            return self._by_calibration(self.calibrated, problem, start)
        if self.guide.model is None:
            return Tuned(problem, self.bench.default(problem), "default", seconds=time.perf_counter() - start)
        known, config = (False, None) if self._own_model else self.bench.first_choice(problem, self.guide)
        if known and config is None:
            default, reason = self.bench.default(problem), "no tile is expected to be clearly faster than the default"
            return Tuned(problem, default, "default", seconds=time.perf_counter() - start, reason=reason)
        if known and config is not None:
            return Tuned(problem, config, "model", seconds=time.perf_counter() - start)
        configs = self.bench.configs(problem)
        scores = self.guide.scores(self.bench.family(problem.family), problem, configs)
        first = self.guide.first(scores, configs, self._memory(problem), problem)
        if self.guide.prior.slope * float(scores[0] - scores[first]) < self.bench.margin:
            reason = f"the model expects less than {self.bench.margin:.1%} over the default"
            return Tuned(problem, configs[0], "default", seconds=time.perf_counter() - start, reason=reason)
        return Tuned(problem, configs[first], "model", seconds=time.perf_counter() - start)

    def _by_calibration(self, calibrated: Calibrated, problem: Problem, start: float) -> Tuned:
        configs = None if problem.family == "matmul" else self.bench.configs(problem)
        config = calibrated.choose(problem, configs)
        seconds = time.perf_counter() - start
        if config is None:
            reason = "this machine's calibration promises no tile faster than the default"
            return Tuned(problem, self.bench.default(problem), "default", seconds=seconds, reason=reason)
        return Tuned(problem, config, "calibrated", seconds=seconds)

    def _from_cache(self, kept: Choice, start: float) -> Tuned:
        return Tuned(
            kept.problem,
            kept.config,
            "cache",
            kept.runtime_ns,
            None,
            kept.measurements,
            kept.sure,
            time.perf_counter() - start,
            "it was tuned before",
        )

    # Tuning

    def tune(
        self,
        spec: Problem | Mapping[str, Value],
        *,
        budget: int | None = None,
        exactly: bool = False,
        fresh: bool = False,
        report: Callable[[Step, Config], None] = lambda step, config: None,
    ) -> Tuned:
        """Measure until sure. `exactly` spends the whole budget; `fresh` ignores an earlier choice."""
        problem, start = self.problem(spec), time.perf_counter()
        configs = self.bench.configs(problem)
        self.choices.refresh()
        kept = None if fresh else self.choices.get(problem, configs.__contains__)
        if kept is not None:
            return self._from_cache(kept, start)
        with self._open_store() as store:
            run = store.begin(self.bench.machine, 0, {"tuner": True, "model": self.guide.name})
            kernel = Kernel(PROGRAM, problem)
            if not store.claim(run, kernel):
                found = self._await(problem, configs)
                if found is not None:
                    return self._from_cache(found, start)
            rule = self._rule(budget, exactly)
            tuned = self._measure(problem, configs, store, run, rule, start, report)
            store.release(kernel)
        if tuned.runtime_ns is not None:
            self.choices.put(Choice(problem, tuned.config, tuned.runtime_ns, tuned.measurements, tuned.sure))
        self._tell(self.choices.notes)
        return tuned

    def _rule(self, budget: int | None, exactly: bool) -> Rule:
        rule = self.guide.rule
        most = budget or self.budget or rule.budget
        return Rule(0.0 if exactly else rule.gain, rule.sure, most, rule.least)

    def _measure(
        self,
        problem: Problem,
        configs: Sequence[Config],
        store: Store,
        run: int,
        rule: Rule,
        start: float,
        report: Callable[[Step, Config], None],
    ) -> Tuned:
        kernel = Kernel(PROGRAM, problem)
        belief, rule = self._belief(problem, configs, store, rule)
        defaults: list[float] = []
        notes: list[str] = []
        with self.bench.trial(problem, configs[0]) as trial:

            def take(index: int) -> float | None:
                timed = trial.measure(configs[index])
                self._keep(store, run, kernel, configs[index], timed)
                if timed.default_ns is not None:
                    defaults.append(timed.default_ns)
                    timed = _beside(defaults[0], timed)
                    if 0 not in belief.measured and index:  # it was timed beside; what it took is known for nothing
                        belief.learn(0, math.log(defaults[0]))
                if timed.runtime_ns is None:
                    notes.append(f"{configs[index].key} is left out: {timed.reason}")
                    self._tell(notes[-1:])
                return timed.runtime_ns

            found = search(belief, take, rule, lambda step: report(step, configs[step.index]))
            if isinstance(trial, SideBySide):
                turns = trial.side_by_side
                best = settle(belief, lambda few: turns([configs[i] for i in few]), _FAR, final=True)
            else:
                best = settle(belief, lambda few: [take(index) for index in few], _CLOSE)
                first = found.steps[0].index if found.steps else None
                if best is not None and first in belief.measured and _is_close(belief, first, best):
                    best = first  # the model's; of several noisy readings the shortest is a lucky one
        default_ns, source = defaults[0] if defaults else None, "measured"
        runtime_ns = math.exp(belief.measured[best]) if best is not None else None
        if best is None:
            best, runtime_ns, source = 0, default_ns, "default"
        elif default_ns is not None and runtime_ns is not None and runtime_ns > default_ns * (1 - _WORTH):
            best, runtime_ns = 0, default_ns  # within noise; the default's path through the code is the shortest
        if best and not self._holds_elsewhere(problem, configs[best]):
            best = self._best_at_home(belief, problem, configs)
            runtime_ns = math.exp(belief.measured[best]) if best else default_ns
            notes.append("the fastest loses at another thread count, where it would be used as well")
        return Tuned(
            problem, configs[best], source, runtime_ns, default_ns, found.measurements, found.sure,
            time.perf_counter() - start, found.reason, found.steps, notes,
        )  # fmt: skip

    def _belief(self, problem: Problem, configs: Sequence[Config], store: Store, rule: Rule) -> tuple[Belief, Rule]:
        """What to start from, and the rule; that one's claims hold for the guide's beliefs, not for a bench's own."""
        start = self._start(problem, configs)
        if start is not None:
            memory = self._memory(problem, store)
            sizes = shape_fields(problem) if memory is not None else None
            return Belief(start[0], space_of(configs).scaled(start[1]), start[1], memory, sizes), replace(
                rule, sure=0.0
            )
        opinion = None if self._own_model or self.guide.model is None else self.bench.opinion(problem, configs)
        if opinion is not None:
            belief = Belief(opinion[0], space_of(configs).scaled(opinion[1]), opinion[1])
            _, first = self.bench.first_choice(problem, self.guide)
            belief.start_with = configs.index(first) if first in configs else None
            return belief, replace(rule, sure=0.0)
        scores = self.guide.scores(self.bench.family(problem.family), problem, configs)
        return self.guide.belief(scores, configs, self._memory(problem, store), problem), rule

    def _start(self, problem: Problem, configs: Sequence[Config]) -> tuple[Numbers, Prior] | None:
        """Where to start measuring: from this machine's calibration, or, without a model, near the default."""
        blind, calibrated = self.guide.model is None, self.calibrated
        if calibrated is not None and calibrated.knows(problem) and (blind or calibrated.covers(problem.family)):
            return calibrated.expected(problem, configs, configs[0])[0], _CALIBRATED_PRIOR
        return self.bench.start(problem, configs) if blind else None

    def _holds_elsewhere(self, problem: Problem, config: Config) -> bool:
        """Whether a choice is not slower than the default wherever else it would be used."""
        for there, tile in self.bench.elsewhere(problem, config):
            with self.bench.trial(there, self.bench.default(there)) as trial:
                timed = trial.measure(tile)
            if (
                timed.runtime_ns is None
                or timed.default_ns is None
                or timed.runtime_ns > timed.default_ns * (1 + _LUCK)
            ):
                return False
        return True

    def _best_at_home(self, belief: Belief, problem: Problem, configs: Sequence[Config]) -> int:
        """The fastest that was measured and is used for this problem alone; else the default."""
        ahead = sorted((logs, index) for index, logs in belief.measured.items())
        worth = belief.measured.get(0, math.inf) + math.log(1 - _WORTH)
        return next((i for logs, i in ahead if logs < worth and not self.bench.elsewhere(problem, configs[i])), 0)

    def _keep(self, store: Store, run: int, kernel: Kernel, config: Config, timed: Timed) -> None:
        store.add_verdicts(run, kernel, [VerdictRow(config, timed.status, timed.reason)])
        if timed.runtime_ns is not None:
            store.add_batch(run, kernel, 0, timed.default_ns or timed.runtime_ns, [(config, timed.runtime_ns)])

    def _await(self, problem: Problem, configs: Sequence[Config]) -> Choice | None:
        """Another process tunes this problem now: take its choice when it comes."""
        self._tell([f"another process is tuning {problem.key}; waiting for its choice"])
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until:
            time.sleep(0.1)
            self.choices.refresh()
            found = self.choices.get(problem, configs.__contains__)
            if found is not None:
                return found
        return None

    # What was measured before

    @contextlib.contextmanager
    def _open_store(self) -> Iterator[Store]:
        """The machine's store; a damaged one is put aside, said, and begun anew."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(f"{self.folder} cannot be written ({error.strerror or error}).") from error
        try:
            store = Store(self.store_file)
        except FileFormatError as error:
            aside = self.store_file.with_suffix(f".damaged-{int(time.time())}")
            self.store_file.replace(aside)
            self._tell([f"{error} It was put aside as {aside.name}, and a new one begun."])
            store = Store(self.store_file)
        with store:
            yield store

    def _memory(self, problem: Problem, store: Store | None = None) -> Memory | None:
        if store is not None:
            return self._recollection(problem.family, store).near(problem)
        if not self.store_file.is_file():
            return None
        stamp, known = self._stamp(), self._recollections.get(problem.family)
        if known is None or known[0] != stamp:
            with self._open_store() as opened:
                known = stamp, self._recollection(problem.family, opened)
            self._recollections[problem.family] = known
        return known[1].near(problem)

    def _recollection(self, family: str, store: Store) -> Recollection:
        return Recollection(self.guide, self.bench.family(family), measurements(store, family), self.bench.configs)

    def _stamp(self) -> list[int]:
        """Differs when the store was written to, by whomever."""
        files = (self.store_file, self.store_file.with_name(f"{self.store_file.name}-wal"))
        stats = [file.stat() for file in files if file.is_file()]
        return [number for stat in stats for number in (stat.st_mtime_ns, stat.st_size)]


def _is_close(belief: Belief, index: int, best: int) -> bool:
    return belief.measured[index] - belief.measured[best] < _LUCK


def _beside(default_ns: float, timed: Timed) -> Timed:
    """A trial as if the default had taken so long in it: clocks drift, and only what ran in turns compares."""
    if timed.runtime_ns is None or timed.default_ns is None:
        return timed
    return replace(timed, runtime_ns=timed.runtime_ns * default_ns / timed.default_ns, default_ns=default_ns)


def measurements(store: Store, family: str) -> dict[Problem, dict[Config, float]]:
    """Every runtime in a store, by problem; where one was measured twice, the faster."""
    found: dict[Problem, dict[Config, float]] = {}
    for kernel in store.kernels():
        if kernel.problem.family == family:
            times = found.setdefault(kernel.problem, {})
            for batch in store.batches(kernel):
                for key, runtime_ns in batch.runtime_ns.items():
                    config = Config.parse(key)
                    times[config] = min(runtime_ns, times.get(config, runtime_ns))
    return found


def open_bench(device: str, limit_s: float | None = None) -> Bench:
    """The bench called "cpu" or "triton"."""
    if device == "cpu":
        from tilewise.tune.measure.cpu.device import CpuBench

        return CpuBench(limit_s)
    if device == "triton":
        from tilewise.tune.measure.triton.device import TritonBench

        return TritonBench()
    raise ConfigurationError(f"There is no device {device!r} to tune on; use cpu or triton.")
