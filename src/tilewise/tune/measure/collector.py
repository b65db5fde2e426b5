"""The collector: which kernels wait, what the store holds of them, and what has been counted so far.

One run on one machine. Kernels are ordered so that any prefix is a balanced sample of the families and programs: a stop
at any moment leaves a usable collection, and every timing is in the store as soon as it is taken. How a kernel is
measured is the device's affair: in this process (`cpu/collector.py`), or compiled in many processes and timed in one
that owns the GPU (`triton/collector.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise._wording import pluralize
from tilewise.store.aggregate import MeasuredProblem, measured_problem
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import BatchRow, Machine, Store, Verdict
from tilewise.tune.measure.sampling import Batch, Settings
from tilewise.tune.measure.schedule import Tally, balanced, summary, unfinished

Say = Callable[[str], None]
_BETWEEN_LINES = 10.0  # seconds
_TOLD = 20  # failures of a family


@dataclass
class Options:
    """For how long, how many configurations a kernel, and how they are timed; the last five are of a GPU alone."""

    minutes: float = 8.0
    seed: int = 0
    max_configs: int = 0  # 0: all
    finals: bool = False  # only those, of kernels that are finished and have had none
    settings: Settings = field(default_factory=Settings)
    device: str = "cuda"  # or "interpreter"
    processes: int = 0  # 0: one fewer than the cores, less one for the GPU's
    thin: int = 0  # so many of each kernel that is trained on, half of them those the shipped model likes best; 0: all
    plugins: tuple[str, ...] = ()
    verbose: bool = False


class Collector:
    """One run. `run` returns what happened, by family; the measurements are in the store."""

    def __init__(
        self, kernels: Iterable[Kernel], store: Store, options: Options, machine: Machine, say: Say = print
    ) -> None:
        self.store, self.say, self.wanted = store, say, list(kernels)
        self.progress: Callable[[int, int, str], None] | None = None
        self.run_number = 0
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        store.choose_partition(machine)
        self.kernels = balanced(unfinished(self.wanted, store, options.finals), options.seed)
        self.started = self._said = time.monotonic()
        self.deadline = self.started + options.minutes * 60
        self.options = options

    def run(self) -> dict[str, Tally]:
        raise NotImplementedError

    # In the store

    def open_run(self, machine: Machine, **settings: Any) -> None:
        about = {**dataclasses.asdict(self.options.settings), "max_configs": self.options.max_configs, **settings}
        self.run_number = self.store.begin(machine, self.options.seed, about)

    def claims(self, kernel: Kernel) -> bool:
        """Take a kernel for this process, unless another has it, or has been faster."""
        finals = self.options.finals
        if not self.store.claim(self.run_number, kernel, again=finals):
            return False
        if finals and not unfinished([kernel], self.store, finals):
            self.store.release(kernel)
            return False
        return True

    def tally(self, kernel: Kernel) -> Tally:
        return self.tallies[kernel.problem.family]

    def recorder(self, kernel: Kernel) -> Recorder:
        return Recorder(self.store, self.run_number, kernel, self.tally(kernel))

    def add_verdicts(self, kernel: Kernel, rows: Sequence[Verdict]) -> None:
        self.store.add_verdicts(self.run_number, kernel, rows)
        tally = self.tally(kernel)
        tally.verdicts.update(row.status for row in rows)
        bad = [f"{r.status}: {kernel.problem.key} {r.config.key}: {r.reason}" for r in rows if r.status in _BAD]
        tally.failures += bad[: max(0, _TOLD - len(tally.failures))]

    def give_up(self, kernel: Kernel, reason: str) -> None:
        """Count a failure and leave the kernel to whoever tries it next."""
        self.tally(kernel).failures.append(f"{kernel.name}: {reason}"[:300])
        self.store.release(kernel)

    def finish(self, kernel: Kernel, default: Config, seconds: float) -> MeasuredProblem | None:
        """Mark a kernel as measured, if anything of it could be timed."""
        measured = measured_problem(self.store, kernel, default)
        if measured is None:
            self.give_up(kernel, "nothing could be timed")
            return None
        self.store.finish(self.run_number, kernel, default, seconds)
        tally = self.tally(kernel)
        tally.kernels += 1
        tally.pairs += len(measured.timings)
        tally.scatter += [timing.deviation for timing in measured.timings if timing.config != default]
        return measured

    # Telling

    def time_left(self) -> bool:
        return time.monotonic() < self.deadline

    def tell(self, done: int, total: int, more: str = "") -> None:
        """How far it is: to the progress bar, or as a line now and then."""
        if self.progress is not None:
            self.progress(done, total, summary(self.tallies) + more)
            return
        now = time.monotonic()
        if now - self._said > _BETWEEN_LINES or done == total:
            self._said = now
            waiting = pluralize(total - done, "kernel")
            self.say(f"{now - self.started:5.0f} s: {summary(self.tallies)}{more}; {waiting} to go")


_BAD = ("wrong", "failed")


class Recorder:
    """Writes what is reported of one kernel (`sampling.Report`) to the store as it comes."""

    def __init__(self, store: Store, run: int, kernel: Kernel, tally: Tally) -> None:
        self._store, self._run, self._kernel, self._tally = store, run, kernel, tally
        self._batch = 0
        self.kinds: Mapping[str, Callable[..., None]] = {
            "begin": self._begin, "timing": self._timing, "batch": self._close, "judged": self._judge,
        }  # fmt: skip

    def __call__(self, kind: str, *parts: Any) -> None:
        self.kinds[kind](*parts)

    def _begin(self, number: int, default_ns: float) -> None:
        self._batch = self._store.open_batch(self._run, self._kernel, number, default_ns)

    def _timing(self, config: Config, runtime_ns: float) -> None:
        self._store.add_timing(self._batch, config, runtime_ns)

    def _close(self, batch: Batch) -> None:
        self._store.close_batch(self._batch, batch.default_ns, disturbed=batch.disturbed, watch=batch.watch)
        self._tally.batches += 1
        self._tally.disturbed += batch.disturbed

    def _judge(self, batch: BatchRow, moved: bool) -> None:
        self._store.close_batch(batch.number, batch.default_ns, disturbed=moved, watch={"resumed": 1})
