"""The collector on a GPU: many processes compile kernels and one process measures them.

The GPU process measures the first kernel in order whose binaries are all compiled. If it dies or hangs, the kernel is
measured once more, one configuration at a time, which identifies the culprit; the other configurations go on. A kernel
that was interrupted when a collector ended is continued by the next one from the timings in the store.
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
from tilewise.gpu.devices import H200_CAPABILITY, model_collection, shared_bytes_of
from tilewise.gpu.families.family import Binary, TritonFamily, get_family
from tilewise.gpu.measure import compiler, execution
from tilewise.profile.timing.gpu import GpuWatch
from tilewise.profile.timing.workers import Worker, WorkerLostError, wait_any
from tilewise.store.aggregate import MeasuredProblem, contenders
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import Machine, Store, Verdict
from tilewise.tune.choose.scores import ModelScores, shipped_scores
from tilewise.tune.measure.collector import Collector, MeasurementRecorder, Options, Say, Tally, pick_configs
from tilewise.tune.workloads import split_of

_COMPILE_SECONDS = 90.0  # time limit of one compilation
_SILENCE_SECONDS = 45.0  # the GPU process reports every timing; a longer silence means that it hangs
_MAX_MESSAGES = 256  # of the GPU process that are handled before the compile workers are polled again
_START_SECONDS = 180.0  # time limit for starting the GPU process: importing PyTorch and creating a CUDA context
_MAX_GPU_DEATHS = 20  # crashes of the GPU process after which a kernel is skipped


@dataclass
class _Pending:
    """A kernel whose configurations are being compiled or measured."""

    kernel: Kernel
    configs: list[Config]
    binaries: list[Binary]
    misfits: list[Verdict] = field(default_factory=list)  # configurations that were rejected before compiling
    careful: bool = False
    last_tried: Config | None = None
    default: Config | None = None
    recorder: MeasurementRecorder | None = None  # set while it is measured


class TritonCollector(Collector):
    """One collection run on this GPU, or in Triton's interpreter."""

    # Entry points of the child processes; tests replace them.
    serve_gpu = staticmethod(execution.serve)
    serve_compiler = staticmethod(compiler.serve)
    silence_seconds = _SILENCE_SECONDS

    def __init__(self, kernels: Iterable[Kernel], store: Store, options: Options, say: Say = print) -> None:
        """Select each kernel's configurations, and list the binaries to compile for them."""
        cuda = options.device == "cuda"
        self._kind = "triton" if cuda else "triton-interpreter"
        # Read through NVML, without CUDA, so that compiling can begin while the GPU process starts.
        self.capability = (GpuWatch().capability() if cuda else None) or H200_CAPABILITY
        self.shared_bytes = shared_bytes_of(self.capability)
        name = GpuWatch().name() if cuda else "Triton interpreter"
        super().__init__(kernels, store, options, Machine(self._kind, name, {}), say)
        self.waiting = deque(self._pending(kernel) for kernel in self.kernels)
        self.compile_results: dict[str, compiler.CompileResult] = {}
        self.current: _Pending | None = None
        self._job_seconds: deque[float] = deque([3.0], maxlen=50)

    def _pending(self, kernel: Kernel) -> _Pending:
        """Return a kernel's configurations and binaries; those that cannot fit the GPU are listed apart."""
        family = get_family(kernel.problem.family)
        if self.options.finals:
            selected = contenders(self.store, kernel, self.options.settings.finalists)
        else:
            selected = self._select_configs(family, kernel)
        reasons = {config: family.misfit(kernel.problem, config, self.shared_bytes) for config in selected}
        misfits = [Verdict(config, "misfit", reason) for config, reason in reasons.items() if reason is not None]
        configs = [config for config, reason in reasons.items() if reason is None]
        binaries = [family.binary(kernel.problem, config) for config in configs]
        return _Pending(kernel, configs, binaries, misfits, default=selected[0])

    def _select_configs(self, family: TritonFamily, kernel: Kernel) -> list[Config]:
        """Return all configurations of a kernel, or with `thin` a sample that favours those the model ranks high."""
        configs, options = family.configs(kernel.problem), self.options
        if not options.thin or split_of(kernel.program) != "train":
            return pick_configs(configs, options.max_configs, options.seed)
        scores = None if self._model is None else self._model.scores(kernel.problem, configs).tolist()
        return pick_configs(configs, options.thin, options.seed + int(kernel.problem.digest[:8], 16), scores)

    @functools.cached_property
    def _model(self) -> ModelScores | None:
        return shipped_scores(model_collection(self.capability), "this GPU", "triton")[0]

    # The loop

    def run(self) -> dict[str, Tally]:
        """Start the worker processes and measure until all is done or time is up; return counts by family."""
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
        """Open a run in the store for the GPU that `details` describes."""
        self.say(f"{time.monotonic() - self.started:.0f} s: device {details}")
        self.shared_bytes = int(details.get("shared_bytes", self.shared_bytes))
        if int(details.get("compute_capability", self.capability)) != self.capability:
            raise UnavailableError(
                f"The GPU that runs has compute capability {details['compute_capability']}, and kernels were compiled "
                f"for {self.capability}; hide the other GPU with CUDA_VISIBLE_DEVICES."
            )
        self.open_run(Machine(self._kind, str(details["name"]), details), thin=self.options.thin)

    def _loop(self, compilers: Sequence[Worker]) -> None:
        """Distribute work to the processes and handle their messages until all is done or time is up."""
        queue = deque(self.binaries())
        while self.time_left() and (self.waiting or self.current):
            for worker in compilers:
                if not worker.busy and queue:
                    worker.submit(queue.popleft(), _COMPILE_SECONDS)
            if self.current is None and self.run_number:
                self._submit_next()
            for worker, message in wait_any([self.gpu, *compilers], 0.25):
                if worker is self.gpu:
                    self._on_gpu_messages(message)
                else:
                    key = worker.task.key
                    worker.finish()
                    if isinstance(message, WorkerLostError):
                        message = compiler.CompileResult(0, 0.0, f"does not compile: {message}")
                    self.compile_results[key] = message
            done = sum(tally.kernels for tally in self.tallies.values())
            progress = f"; {len(self.compile_results)} binaries compiled, {len(queue)} to compile"
            self.report_progress(done, done + len(self.waiting) + (self.current is not None), progress)

    def binaries(self) -> list[Binary]:
        """List the distinct binaries of all kernels, in the order of the kernels."""
        binaries: dict[str, Binary] = {}
        for pending in self.waiting:
            for binary in pending.binaries:
                binaries.setdefault(binary.key, binary)
        return list(binaries.values())

    # The GPU

    def _submit_next(self) -> None:
        """Send the next kernel that is compiled, fits into the remaining time and is not claimed elsewhere."""
        # The median of recent kernels predicts how long the next one takes.
        remaining = self.deadline - time.monotonic()
        if remaining < statistics.median(self._job_seconds):
            self.deadline = time.monotonic()
            return
        for index, pending in enumerate(self.waiting):
            if all(binary.key in self.compile_results for binary in pending.binaries):
                del self.waiting[index]
                if self.claims(pending.kernel):
                    self._submit(pending)
                return

    def _submit(self, pending: _Pending) -> None:
        """Send a kernel to the GPU process, without configurations that failed to compile or do not fit."""
        misfits, fitting = pending.misfits, []
        pending.misfits = []
        for config, binary in zip(pending.configs, pending.binaries, strict=True):
            result = self.compile_results[binary.key]
            if result.failure is not None:
                misfits.append(Verdict(config, "failed", result.failure))
            elif result.shared_bytes > self.shared_bytes:
                reason = f"shared memory: {result.shared_bytes} bytes needed, {self.shared_bytes} available"
                misfits.append(Verdict(config, "misfit", reason))
            else:
                fitting.append(config)
        if misfits:
            self.add_verdicts(pending.kernel, misfits)
        # Runtimes are normalised by the default's, so a kernel without it is useless.
        if not fitting or fitting[0] != pending.default:
            self.give_up(pending.kernel, "the default configuration does not fit")
            return
        self.current, pending.recorder = pending, self.recorder(pending.kernel)
        # Operands differ between kernels and are the same in every run with this seed.
        seed = self.options.seed * 1_000_003 + int(pending.kernel.problem.digest[:8], 16)
        earlier = tuple(self.store.batches(pending.kernel))
        problem, options = pending.kernel.problem, self.options
        job = execution.Job(
            problem, tuple(fitting), seed, options.settings, careful=pending.careful, earlier=earlier,
            finals=options.finals,
        )  # fmt: skip
        self.gpu.submit(job, self.silence_seconds if self.gpu.connection else _START_SECONDS)

    def _on_gpu_messages(self, message: Any) -> None:
        """Handle this message and all others in the pipe, which would be lost if the GPU process were killed now."""
        self._on_gpu_message(message)
        for _ in range(_MAX_MESSAGES):
            if not (self.gpu.busy and self.gpu.ready()):
                return
            try:
                message = self.gpu.receive()
            except EOFError:
                return  # `wait_any` notices the end as well and reports it
            self._on_gpu_message(message)

    def _on_gpu_message(self, message: Any) -> None:
        """Handle a message of the GPU process: its greeting, its end, or a result for the current kernel."""
        pending = self.current
        if not self.run_number:
            self._on_greeting(message)
            return
        if isinstance(message, WorkerLostError):
            self.gpu.finish()
            if pending is not None:
                self._on_lost(pending, str(message))
            return
        self.gpu.extend(self.silence_seconds)
        kind = message[0]
        if pending is None or kind == "device":  # the greeting of a restarted process
            return
        self._on_kernel_message(pending, kind, message[1:])

    def _on_kernel_message(self, pending: _Pending, kind: str, content: Sequence[Any]) -> None:
        """Handle a result for the kernel that is being measured; `kind` is the type of message."""
        assert pending.recorder is not None
        if kind in pending.recorder.handlers:
            pending.recorder(kind, *content)
        elif kind == "note":
            self.say(content[0])
        elif kind == "next":
            pending.last_tried = content[0]
        elif kind == "verdicts":
            self.add_verdicts(pending.kernel, content[0])
        elif kind == "failed":
            self.gpu.stop()
            self.say(f"{pending.kernel.name} {pending.kernel.problem.key}: {content[0]}\n{content[1]}")
            self._on_lost(pending, content[0])
        elif kind == "done":
            self.gpu.finish()
            self.current, seconds = None, float(content[0])
            self.tally(pending.kernel).seconds += seconds
            self._job_seconds.append(seconds)
            problem = self.finish(pending.kernel, pending.configs[0], seconds)
            if problem is not None and self.options.verbose:
                self._describe(problem)

    def _on_greeting(self, message: Any) -> None:
        """Open a run for the device in the GPU process's first message; raise if it reports an error."""
        self.gpu.finish()
        if isinstance(message, WorkerLostError):
            raise UnavailableError(f"The process that owns the GPU could not start: {message}.")
        if message[0] != "device":
            raise UnavailableError(str(message[1]))
        self._open_run(message[1])

    def _on_lost(self, pending: _Pending, reason: str) -> None:
        """Handle the end of the GPU process: measure the kernel again in careful mode.

        In that mode the process names each configuration before running it, so that the last one named is at fault.
        """
        self.current = None
        next_step = "that configuration is left out" if pending.careful else "again, with care"
        self.say(f"{pending.kernel.name}: {reason}; {next_step}")
        # Without a named configuration, or if it is the default, the kernel cannot be measured at all.
        if pending.careful:
            culprit = pending.last_tried
            if culprit is None or culprit == pending.configs[0] or self.gpu.deaths > _MAX_GPU_DEATHS:
                self.give_up(pending.kernel, reason)
                return
            self.add_verdicts(pending.kernel, [Verdict(culprit, "failed", f"it ended the process: {reason}")])
            remaining = [i for i, config in enumerate(pending.configs) if config != culprit]
            pending.configs = [pending.configs[i] for i in remaining]
            pending.binaries = [pending.binaries[i] for i in remaining]
        pending.careful, pending.last_tried = True, None
        self.waiting.appendleft(pending)

    # Reporting

    def _describe(self, measurement: MeasuredProblem) -> None:
        """Print a kernel's default, best and worst time in microseconds, and the scatter of repeats."""
        best = min(measurement.timings, key=lambda timing: timing.runtime_ns)
        worst = max(timing.runtime_ns for timing in measurement.timings)
        scatter = statistics.median(timing.deviation for timing in measurement.timings)
        self.say(
            f"{measurement.kernel.problem.key}: default {measurement.default_ns / 1e3:.2f} us, best "
            f"{best.runtime_ns / 1e3:.2f} {best.config.key}, worst {worst / 1e3:.2f}, scatter {scatter:.2%}"
        )
