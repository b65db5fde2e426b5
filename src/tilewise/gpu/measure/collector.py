"""The collector on a GPU: kernels are compiled in many processes and measured in one.

The GPU's process takes the first kernel in order whose binaries are all there. If it dies or hangs, the kernel is tried
once more configuration by configuration, which names the culprit; the rest goes on. A kernel that was under way when a
collector ended is gone on with by the next one, from the timings that are in the store.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise._system import real_cores
from tilewise.errors import UnavailableError
from tilewise.gpu.families.family import Binary, TritonFamily, get_family
from tilewise.gpu.measure import compiling
from tilewise.gpu.measure import kernel as measure
from tilewise.gpu.measure.gpu import COLLECTIONS, HOPPER, usual_shared_bytes
from tilewise.profile.timing.nvml import GpuWatch
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.aggregate import MeasuredProblem, contenders
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import Machine, Store, Verdict
from tilewise.tune.choose.scores import ModelScores, shipped_scores
from tilewise.tune.measure.collector import Collector, Options, Recorder, Say
from tilewise.tune.measure.schedule import Tally, pick_configs
from tilewise.tune.workloads.programs import split_of

_COMPILE_SECONDS = 90.0
_SILENCE_SECONDS = 45.0  # the GPU process reports every timing; longer than this between two reports is a hang
_AT_ONCE = 256  # messages of the GPU's before the compilers get a hearing
_START_SECONDS = 180.0


@dataclass
class _Pending:
    """A kernel that waits for its binaries."""

    kernel: Kernel
    configs: list[Config]
    binaries: list[Binary]
    misfits: list[Verdict] = field(default_factory=list)  # known before compiling
    careful: bool = False
    last_tried: Config | None = None
    default: Config | None = None
    recorder: Recorder | None = None  # while it is measured


class TritonCollector(Collector):
    """One run on this GPU, or in Triton's interpreter."""

    # What the child processes run; a test puts its own here.
    serve_gpu = staticmethod(measure.serve)
    serve_compiler = staticmethod(compiling.serve)
    silence_seconds = _SILENCE_SECONDS

    def __init__(self, kernels: Iterable[Kernel], store: Store, options: Options, say: Say = print) -> None:
        cuda = options.device == "cuda"
        self._kind = "triton" if cuda else "triton-interpreter"
        # Read without CUDA, so that compiling can begin while the GPU's process starts.
        self.capability = (GpuWatch().capability() if cuda else None) or HOPPER
        self.shared_bytes = usual_shared_bytes(self.capability)
        name = GpuWatch().name() if cuda else "Triton interpreter"
        super().__init__(kernels, store, options, Machine(self._kind, name, {}), say)
        self.waiting = deque(self._pending(kernel) for kernel in self.kernels)
        self.compiled: dict[str, compiling.Compiled] = {}
        self.current: _Pending | None = None
        self._job_seconds: deque[float] = deque([3.0], maxlen=50)

    def _pending(self, kernel: Kernel) -> _Pending:
        family = get_family(kernel.problem.family)
        if self.options.finals:
            chosen = contenders(self.store, kernel, self.options.settings.finalists)
        else:
            chosen = self._chosen(family, kernel)
        reasons = {config: family.misfit(kernel.problem, config, self.shared_bytes) for config in chosen}
        misfits = [Verdict(config, "misfit", reason) for config, reason in reasons.items() if reason is not None]
        configs = [config for config, reason in reasons.items() if reason is None]
        return _Pending(
            kernel, configs, [family.binary(kernel.problem, config) for config in configs], misfits, default=chosen[0]
        )

    def _chosen(self, family: TritonFamily, kernel: Kernel) -> list[Config]:
        configs, options = family.configs(kernel.problem), self.options
        if not options.thin or split_of(kernel.program) != "train":
            return pick_configs(configs, options.max_configs, options.seed)
        scores = None if self._model is None else self._model.scores(kernel.problem, configs).tolist()
        return pick_configs(configs, options.thin, options.seed + int(kernel.problem.digest[:8], 16), scores)

    @functools.cached_property
    def _model(self) -> ModelScores | None:
        return shipped_scores(COLLECTIONS.get(self.capability), "this GPU", "triton")[0]

    # The loop

    def run(self) -> dict[str, Tally]:
        cores = real_cores()
        processes = self.options.processes or max(1, cores - 2)
        cache = os.environ.get("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "tilewise-triton-cache"))
        self.gpu = Worker(self.serve_gpu, self.options.device, {"plugins": self.options.plugins, "cache": cache})
        self.gpu.submit_silently(_START_SECONDS)
        compilers = [Worker(self.serve_compiler, self.capability, cache) for _ in range(processes)]
        for worker in compilers:
            worker.start()
        try:
            self._loop(compilers)
            if self.current is not None:
                self.store.release(self.current.kernel)
        finally:
            for worker in (self.gpu, *compilers):
                worker.stop()
        return dict(self.tallies)

    def _open_run(self, details: dict[str, Any]) -> None:
        """The GPU's process is there and has said what it runs on."""
        self.say(f"{time.monotonic() - self.started:.0f} s: device {details}")
        self.shared_bytes = int(details.get("shared_bytes", self.shared_bytes))
        if int(details.get("compute_capability", self.capability)) != self.capability:
            raise UnavailableError(
                f"The GPU that runs has compute capability {details['compute_capability']}, and kernels were compiled "
                f"for {self.capability}; hide the other GPU with CUDA_VISIBLE_DEVICES."
            )
        self.open_run(Machine(self._kind, str(details["name"]), details), thin=self.options.thin)

    def _loop(self, compilers: Sequence[Worker]) -> None:
        queue = deque(self.binaries())
        while self.time_left() and (self.waiting or self.current):
            for worker in compilers:
                if not worker.busy and queue:
                    worker.submit(queue.popleft(), _COMPILE_SECONDS)
            if self.current is None and self.run_number:
                self._submit_next()
            for worker, message in wait_any([self.gpu, *compilers], 0.25):
                if worker is self.gpu:
                    self._hear_all(message)
                else:
                    self._hear_compiler(worker, message)
            done = sum(tally.kernels for tally in self.tallies.values())
            more = f"; {len(self.compiled)} binaries compiled, {len(queue)} to compile"
            self.tell(done, done + len(self.waiting) + (self.current is not None), more)

    def binaries(self) -> list[Binary]:
        """Each once, in the order the kernels want them."""
        found: dict[str, Binary] = {}
        for pending in self.waiting:
            for binary in pending.binaries:
                found.setdefault(binary.key, binary)
        return list(found.values())

    def _hear_compiler(self, worker: Worker, message: Any) -> None:
        binary: Binary = worker.task
        worker.finish()
        if isinstance(message, WorkerLostError):
            message = compiling.Compiled(0, 0.0, f"does not compile: {message}")
        self.compiled[binary.key] = message

    # The GPU

    def _submit_next(self) -> None:
        """The first kernel in order that is ready, fits into the time left, and is not another collector's."""
        remaining = self.deadline - time.monotonic()
        if remaining < statistics.median(self._job_seconds):
            self.deadline = time.monotonic()
            return
        for index, pending in enumerate(self.waiting):
            if all(binary.key in self.compiled for binary in pending.binaries):
                del self.waiting[index]
                if self.claims(pending.kernel):
                    self._submit(pending)
                return

    def _submit(self, pending: _Pending) -> None:
        misfits, fitting = pending.misfits, []
        pending.misfits = []
        for config, binary in zip(pending.configs, pending.binaries, strict=True):
            reason = self._misfit(self.compiled[binary.key])
            if reason is None:
                fitting.append(config)
            else:
                misfits.append(Verdict(config, reason[0], reason[1]))
        if misfits:
            self.add_verdicts(pending.kernel, misfits)
        if not fitting or fitting[0] != pending.default:
            self.give_up(pending.kernel, "the default configuration does not fit")
            return
        self.current, pending.recorder = pending, self.recorder(pending.kernel)
        seed = self.options.seed * 1_000_003 + int(pending.kernel.problem.digest[:8], 16)
        earlier = tuple(self.store.batches(pending.kernel))
        job = measure.Job(
            pending.kernel.problem,
            tuple(fitting),
            seed,
            self.options.settings,
            pending.careful,
            earlier,
            self.options.finals,
        )
        self.gpu.submit(job, self.silence_seconds if self.gpu.connection else _START_SECONDS)

    def _misfit(self, compiled: compiling.Compiled) -> tuple[str, str] | None:
        if compiled.failure is not None:
            return "failed", compiled.failure
        if compiled.shared_bytes > self.shared_bytes:
            return "misfit", f"shared memory: {compiled.shared_bytes} bytes needed, {self.shared_bytes} there"
        return None

    def _hear_all(self, message: Any) -> None:
        """This message and those behind it: what still lies in the pipe is lost if this process is killed."""
        self._hear_gpu(message)
        for _ in range(_AT_ONCE):
            if not (self.gpu.busy and self.gpu.ready()):
                return
            try:
                message = self.gpu.receive()
            except EOFError:
                return  # `wait_any` finds that too, and says so
            self._hear_gpu(message)

    def _hear_gpu(self, message: Any) -> None:
        pending = self.current
        if not self.run_number:
            self._hear_greeting(message)
            return
        if isinstance(message, WorkerLostError):
            self.gpu.finish()
            if pending is not None:
                self._lost(pending, str(message))
            return
        self.gpu.extend(self.silence_seconds)
        kind = message[0]
        if pending is None or kind == "device":  # the greeting of a process that was started again
            return
        self._hear_of(pending, kind, message[1:])

    def _hear_of(self, pending: _Pending, kind: str, parts: Sequence[Any]) -> None:
        """What the GPU's process says of the kernel that it measures."""
        assert pending.recorder is not None
        if kind in pending.recorder.kinds:
            pending.recorder(kind, *parts)
        elif kind == "note":
            self.say(parts[0])
        elif kind == "next":
            pending.last_tried = parts[0]
        elif kind == "verdicts":
            self.add_verdicts(pending.kernel, parts[0])
        elif kind == "failed":
            self.gpu.stop()
            self.say(f"{pending.kernel.name} {pending.kernel.problem.key}: {parts[0]}\n{parts[1]}")
            self._lost(pending, parts[0])
        elif kind == "done":
            self._done(pending, float(parts[0]))

    def _hear_greeting(self, message: Any) -> None:
        self.gpu.finish()
        if isinstance(message, WorkerLostError):
            raise UnavailableError(f"The process that owns the GPU could not start: {message}.")
        if message[0] != "device":
            raise UnavailableError(str(message[1]))
        self._open_run(message[1])

    def _done(self, pending: _Pending, seconds: float) -> None:
        self.gpu.finish()
        self.current = None
        self.tally(pending.kernel).seconds += seconds
        self._job_seconds.append(seconds)
        measured = self.finish(pending.kernel, pending.configs[0], seconds)
        if measured is not None and self.options.verbose:
            self._describe(measured)

    def _lost(self, pending: _Pending, reason: str) -> None:
        """The GPU process is gone. Try again with care; in careful mode the configuration it named is the culprit."""
        self.current = None
        next_step = "that configuration is left out" if pending.careful else "again, with care"
        self.say(f"{pending.kernel.name}: {reason}; {next_step}")
        if pending.careful:
            culprit = pending.last_tried
            if culprit is None or culprit == pending.configs[0] or self.gpu.deaths > 20:
                self.give_up(pending.kernel, reason)
                return
            self.add_verdicts(pending.kernel, [Verdict(culprit, "failed", f"it ended the process: {reason}")])
            keep = [i for i, config in enumerate(pending.configs) if config != culprit]
            pending.configs = [pending.configs[i] for i in keep]
            pending.binaries = [pending.binaries[i] for i in keep]
        pending.careful, pending.last_tried = True, None
        self.waiting.appendleft(pending)

    # Telling

    def _describe(self, measured: MeasuredProblem) -> None:
        """One line on a kernel: microseconds of the default, the best and the worst, and the scatter of the repeats."""
        best = min(measured.timings, key=lambda timing: timing.runtime_ns)
        worst = max(timing.runtime_ns for timing in measured.timings)
        scatter = statistics.median(timing.deviation for timing in measured.timings)
        self.say(
            f"{measured.kernel.problem.key}: default {measured.default_ns / 1e3:.2f} us, best "
            f"{best.runtime_ns / 1e3:.2f} {best.config.key}, worst {worst / 1e3:.2f}, scatter {scatter:.2%}"
        )
