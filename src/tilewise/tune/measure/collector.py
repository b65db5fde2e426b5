"""The collector: one run of measurements on one machine.

Kernels are ordered so that any prefix is a balanced sample of the families and programs. A run may therefore stop at
any moment and leave a usable collection; every timing is in the store as soon as it is taken. Subclasses measure a
kernel: in this process (`cpu/collector.py`), or compiled in many processes and timed in one that owns the GPU
(`gpu/measure/collector.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise._wording import pluralize
from tilewise.errors import ConfigurationError
from tilewise.store.aggregate import FIRST_FINAL_ROUND, MeasuredProblem, measured_problem
from tilewise.store.database import is_url
from tilewise.store.problem import Config, Kernel, Problem, Value, read_shapes, shapes_from
from tilewise.store.store import BatchRow, Machine, Store, Verdict
from tilewise.tune.families.registry import find_family
from tilewise.tune.measure.sampling import TimedBatch, TimingSettings
from tilewise.tune.workloads import built_in_kernels

Say = Callable[[str], None]
_REPORT_SECONDS = 10.0  # between lines of progress
_MAX_FAILURES = 20  # per family in the report; arbitrary


@dataclass
class Options:
    """Settings of a collection run; the last five apply to GPUs only."""

    minutes: float = 8.0
    seed: int = 0
    max_configs: int = 0  # 0: all
    finals: bool = False  # run only the finals of finished kernels that have none
    settings: TimingSettings = field(default_factory=TimingSettings)
    device: str = "cuda"  # or "interpreter"
    processes: int = 0  # that compile; 0: two fewer than the cores
    thin: int = 0  # configurations per training kernel, half of them the shipped model's favorites; 0: all
    plugins: tuple[str, ...] = ()
    verbose: bool = False


class Collector:
    """One run of measurements. `run` returns a tally per family; the measurements are in the store."""

    def __init__(
        self, kernels: Iterable[Kernel], store: Store, options: Options, machine: Machine, say: Say = print
    ) -> None:
        """Select the kernels without finished measurements in the store, in an order that balances families."""
        self.store, self.say, self.requested = store, say, list(kernels)
        self.progress: Callable[[int, int, str], None] | None = None
        self.run_number = 0
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        store.choose_partition(machine)
        self.kernels = balanced(unfinished(self.requested, store, options.finals), options.seed)
        self.started = self._last_report = time.monotonic()
        self.deadline = self.started + options.minutes * 60
        self.options = options

    def run(self) -> dict[str, Tally]:
        """Measure until all kernels are finished or time is up."""
        raise NotImplementedError

    # In the store

    def open_run(self, machine: Machine, **settings: Any) -> None:
        """Record the start of a measurement run on this machine, with its settings, in the store."""
        run_settings = {
            **dataclasses.asdict(self.options.settings),
            "max_configs": self.options.max_configs,
            **settings,
        }
        self.run_number = self.store.begin(machine, self.options.seed, run_settings)

    def claims(self, kernel: Kernel) -> bool:
        """Claim a kernel for this process; False if another process measures or has finished it."""
        finals = self.options.finals
        if not self.store.claim(self.run_number, kernel, again=finals):
            return False
        if finals and not unfinished([kernel], self.store, finals):
            self.store.release(kernel)
            return False
        return True

    def tally(self, kernel: Kernel) -> Tally:
        """Return the counts of the kernel's family."""
        return self.tallies[kernel.problem.family]

    def recorder(self, kernel: Kernel) -> MeasurementRecorder:
        """Return a callback that writes timing events of a kernel to the store."""
        return MeasurementRecorder(self.store, self.run_number, kernel, self.tally(kernel))

    def add_verdicts(self, kernel: Kernel, rows: Sequence[Verdict]) -> None:
        """Store and count the verdicts (correct, wrong, failed, ...) on a kernel's configurations."""
        self.store.add_verdicts(self.run_number, kernel, rows)
        tally = self.tally(kernel)
        tally.verdicts.update(row.status for row in rows)
        bad = [f"{r.status}: {kernel.problem.key} {r.config.key}: {r.reason}" for r in rows if r.status in _BAD]
        tally.failures += bad[: max(0, _MAX_FAILURES - len(tally.failures))]

    def give_up(self, kernel: Kernel, reason: str) -> None:
        """Count a failed kernel and release its claim, so that another run may try it."""
        self.tally(kernel).failures.append(f"{kernel.name}: {reason}"[:300])
        self.store.release(kernel)

    def finish(self, kernel: Kernel, default: Config, seconds: float) -> MeasuredProblem | None:
        """Mark a kernel as finished; give it up if nothing could be timed."""
        result = measured_problem(self.store, kernel, default)
        if result is None:
            self.give_up(kernel, "nothing could be timed")
            return None
        self.store.finish(self.run_number, kernel, default, seconds)
        tally = self.tally(kernel)
        tally.kernels += 1
        tally.pairs += len(result.timings)
        tally.scatter += [timing.deviation for timing in result.timings if timing.config != default]
        return result

    # Progress

    def time_left(self) -> bool:
        """Tell whether the deadline has not passed."""
        return time.monotonic() < self.deadline

    def report_progress(self, done: int, total: int, more: str = "") -> None:
        """Show that `done` of `total` kernels are measured: a progress bar, or a line every few seconds."""
        if self.progress is not None:
            self.progress(done, total, summary(self.tallies) + more)
            return
        now = time.monotonic()
        if now - self._last_report > _REPORT_SECONDS or done == total:
            self._last_report = now
            waiting = pluralize(total - done, "kernel")
            self.say(f"{now - self.started:5.0f} s: {summary(self.tallies)}{more}; {waiting} to go")


_BAD = ("wrong", "failed")


class MeasurementRecorder:
    """Writes timing events of one kernel to the store as they happen."""

    def __init__(self, store: Store, run: int, kernel: Kernel, tally: Tally) -> None:
        """Store where to write the events of this kernel, and the tally to count them in."""
        self._store, self._run, self._kernel, self._tally = store, run, kernel, tally
        self._batch = 0
        self.handlers: Mapping[str, Callable[..., None]] = {
            "begin": self._begin, "timing": self._timing, "batch": self._close, "judged": self._close_resumed,
        }  # fmt: skip

    def __call__(self, kind: str, *arguments: Any) -> None:
        self.handlers[kind](*arguments)

    def _begin(self, number: int, default_ns: float) -> None:
        self._batch = self._store.open_batch(self._run, self._kernel, number, default_ns)

    def _timing(self, config: Config, runtime_ns: float) -> None:
        self._store.add_timing(self._batch, config, runtime_ns)

    def _close(self, batch: TimedBatch) -> None:
        """Store the end of a batch with its default's runtime, and count it."""
        self._store.close_batch(self._batch, batch.default_ns, disturbed=batch.disturbed, watch=batch.watch)
        self._tally.batches += 1
        self._tally.disturbed += batch.disturbed

    def _close_resumed(self, batch: BatchRow, disturbed: bool) -> None:
        """Store the end of a batch that an interrupted run had left open."""
        self._store.close_batch(batch.number, batch.default_ns, disturbed=disturbed, watch={"resumed": 1})


@dataclass
class Tally:
    """Counts of one kernel family in a run."""

    kernels: int = 0
    pairs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    scatter: list[float] = field(default_factory=list)
    batches: int = 0
    disturbed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def balanced(kernels: Sequence[Kernel], seed: int) -> list[Kernel]:
    """Order kernels so that every prefix contains each family in proportion."""
    rng = random.Random(seed)
    families: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        families[kernel.problem.family].append(kernel)
    keyed = []
    for members in families.values():
        rng.shuffle(members)
        keyed += [((index + rng.random()) / len(members), kernel) for index, kernel in enumerate(members)]
    return [kernel for _, kernel in sorted(keyed, key=lambda pair: pair[0])]


def unfinished(kernels: Iterable[Kernel], store: Store, finals: bool) -> list[Kernel]:
    """List the kernels not measured yet or, with `finals`, the measured ones without final timings."""
    done = store.finished()
    if not finals:
        return [kernel for kernel in kernels if kernel.problem.key not in done]
    done -= store.finished_from(FIRST_FINAL_ROUND)
    return [kernel for kernel in kernels if kernel.problem.key in done]


def pick_configs(
    configs: Sequence[Config], count: int, seed: int, scores: Sequence[float] | None = None, near: float = 0.0
) -> list[Config]:
    """Select the default and `count - 1` others at random; all of them if `count` is 0.

    With `scores` (lower is better), half of them are the best-ranked ones instead. A share `near` of them are neighbors
    of the default, which differ from it in the fewest settings; most improvements are found there.
    """
    if not count or len(configs) <= count:
        return list(configs)
    rng, indices = random.Random(seed), range(1, len(configs))
    preferred = [] if scores is None else sorted(indices, key=scores.__getitem__)[: count // 2]
    if near:
        # Number of settings in which a configuration differs from the default.
        differences = {i: sum(value != configs[i][name] for name, value in configs[0].items()) for i in indices}
        preferred = sorted(indices, key=lambda index: (differences[index], rng.random()))[: round(near * count)]
    others = sorted(set(indices) - set(preferred))
    random_picks = rng.sample(others, count - 1 - len(preferred))
    return [configs[index] for index in (0, *preferred, *random_picks)]


def summary(tallies: dict[str, Tally]) -> str:
    """Format the counts of all families for a progress line."""
    kernels = sum(t.kernels for t in tallies.values())
    pairs = sum(t.pairs for t in tallies.values())
    scatter = [s for t in tallies.values() for s in t.scatter]
    noise = f"{statistics.median(scatter):.2%}" if scatter else "-"
    return f"{pluralize(kernels, 'kernel')}, {pluralize(pairs, 'pair')}, scatter {noise}"


KINDS = ("cpu", "triton")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Collected:
    """Result of `collect`: what the run added, and what the store contains now."""

    store: Path | str  # its file, or its URL without the password
    kernels: int  # finished in this run
    pairs: int
    scatter: float | None  # median relative deviation of the repeats in this run
    in_store: dict[str, int]  # kernels, pairs, timings, batches, disturbed
    verdicts: dict[str, dict[str, int]]  # by family
    failures: list[str] = field(default_factory=list)
    left: int = 0  # kernels that are not yet measured, because time was up


def collect(
    kind: str,
    *,
    shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None = None,
    minutes: float = 8.0,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    configs: int | None = None,
    device: str = "cuda",
    plugins: Sequence[str] = (),
    finals: bool = False,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> Collected:
    """Measure tiled kernels on this CPU or, through Triton, on this GPU.

    `shapes` is a JSON file or a list of problems such as ``{"family": "matmul", "m": 512, "n": 4096, "k": 1024}``;
    without it the kernels of the built-in programs are measured. `out` is the store, a file or a postgresql:// URL,
    which is created or continued; `configs` limits the configurations of a kernel (0: all of them). `plugins` are
    modules that add kernel families when they are imported. With `finals` nothing new is measured: the fastest few
    configurations of finished kernels without finals are timed again, interleaved.

    >>> collect("cpu", minutes=1.0, out="measurements.sqlite")  # doctest: +SKIP
    """
    if kind not in KINDS:
        raise ConfigurationError(f"There is no collector {kind!r}; use cpu or triton.")
    if not 0 < minutes < 1e6:
        raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
    if configs is not None and (configs < 0 or configs == 1):
        raise ConfigurationError(f"configs must be 0 (all) or at least 2, not {configs}.")
    load_plugins(plugins)
    kernels = read_kernels(kind, shapes) if shapes is not None or not finals else None
    with Store(store_location(out, kind), create=not finals) as store:
        selected = kernels if kernels is not None else store.kernels()
        options = {"minutes": minutes, "seed": seed, "finals": finals, "device": device, "plugins": tuple(plugins)}
        collector = make_collector(kind, selected, store, configs, say, **options)
        collector.progress = progress
        tallies = collector.run()
        counts = store.counts()
        remaining = len(unfinished(collector.requested, store, finals))
        location = store.name if store.shared else store.path
    scatter = [value for tally in tallies.values() for value in tally.scatter]
    return Collected(
        store=location,
        kernels=sum(tally.kernels for tally in tallies.values()),
        pairs=sum(tally.pairs for tally in tallies.values()),
        scatter=statistics.median(scatter) if scatter else None,
        in_store=counts,
        verdicts={family: dict(tally.verdicts) for family, tally in tallies.items()},
        failures=[failure for tally in tallies.values() for failure in tally.failures],
        left=remaining,
    )


def store_location(out: str | os.PathLike[str] | None, kind: str) -> str | Path:
    """Return where the store is: a database URL, or the path of a file."""
    if isinstance(out, str) and is_url(out):
        return out
    return Path(out).expanduser() if out is not None else Path(f"{kind}.sqlite")


def plan_cpu(
    *,
    shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None = None,
    configs: int | None = None,
    plugins: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """List what `collect("cpu", ...)` would measure, a row per family and threads with estimated seconds."""
    from tilewise.tune.families.cpu.family import require_native
    from tilewise.tune.measure.cpu.collector import cpu_options, plan

    require_native()
    load_plugins(plugins)
    options = cpu_options() if configs is None else cpu_options(max_configs=configs)
    return plan(read_kernels("cpu", shapes), options)


def read_kernels(kind: str, shapes: str | os.PathLike[str] | Sequence[Mapping[str, Value]] | None) -> list[Kernel]:
    """Read kernels from a user's file or list; without one, return those of the built-in programs."""
    if shapes is None:
        return built_in_kernels(kind)
    if isinstance(shapes, str | os.PathLike):
        return read_shapes(shapes, problem_parser(kind))
    return shapes_from(list(shapes), "shapes", problem_parser(kind))


def problem_parser(device_kind: str) -> Callable[[str, Mapping[str, Value]], Problem]:
    """Return a function (family, specification) -> checked `Problem` for a kind of device."""

    def parse(family: str, spec: Mapping[str, Value]) -> Problem:
        """Check a specification and return its problem."""
        problem: Problem = find_family(device_kind, family).problem(spec)
        return problem

    return parse


def make_collector(
    kind: str, kernels: Sequence[Kernel], store: Store, configs: int | None, say: Callable[[str], None], **options: Any
) -> Collector:
    """Make the collector of a device. `configs` is the number of configurations per kernel (None: the device's
    default); other keywords are fields of `Options`."""
    if configs is not None:
        options["max_configs"] = configs
    if kind == "cpu":
        from tilewise.tune.measure.cpu.collector import CpuCollector, cpu_options

        return CpuCollector(kernels, store, cpu_options(**options), say)
    from tilewise.gpu.measure.collector import TritonCollector

    if options.get("device") == "interpreter":
        options["settings"] = TimingSettings(unit_ms=0.0, slowest_ms=1e6)
    return TritonCollector(kernels, store, Options(**options), say)


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that register kernel families; the working folder is on the path."""
    for name in modules:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(f"The plug-in {name!r} cannot be imported: {error}.") from error
