"""The actor that measures on one device of a cluster: it claims kernels from the store's queue and times them.

A device lock (see `device_lock.py`) keeps the timings of all actors of a machine apart, whichever driver or cluster
they belong to. An actor takes the lock before it claims a kernel, so that it never holds a claim while it waits.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.errors import UnavailableError
from tilewise.store.problem import Kernel, Problem, Value
from tilewise.store.store import Store
from tilewise_fleet.device_lock import exclusive_device

# Attempts before a kernel leaves the queue: if it fails, and if other work on the machine disturbed its timings.
MAX_ATTEMPTS, MAX_DISTURBED_ATTEMPTS = 3, 20
_LOCK_SECONDS = 2.0  # before `step` reports that the device is busy; arbitrary
_START_SECONDS = 300.0  # `begin` measures the machine's peak rates under the lock; other actors may do so first
_GPU_CHUNK = 16  # kernels per step on a GPU, whose collector compiles them together


@dataclass(frozen=True)
class Campaign:
    """The settings of a campaign, as plain values that Ray can send to its actors."""

    store: str
    kind: str
    kernels: tuple[tuple[str, Mapping[str, Value]], ...]
    seed: int = 0
    configs: int | None = None
    device: str = "cuda"
    plugins: tuple[str, ...] = ()
    minutes: float = 60.0

    def build_kernels(self) -> list[Kernel]:
        """Return the campaign's kernels as `Kernel` objects."""
        return [Kernel(program, Problem(problem)) for program, problem in self.kernels]


class Slot:
    """Ray actor that measures on one device; the driver calls `begin` once and then `step` repeatedly."""

    def __init__(self, campaign: Campaign, device: int = 0, devices: int = 1) -> None:
        """Open the store; on a node with several GPUs, make only GPU number `device` visible."""
        from tilewise.tune.measure.collector import load_plugins

        if devices > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[device] if len(visible) >= devices else str(device)
        load_plugins(campaign.plugins)
        self.campaign, self.device = campaign, device
        self.store = Store(campaign.store)
        self._attempts: Counter[str] = Counter()
        self._collector: Any = None
        self._failures: list[str] = []
        self.run = 0

    def begin(self) -> dict[str, Any]:
        """Start a run and queue kernels not yet measured on this machine; return facts for the driver."""
        with exclusive_device(self.campaign.kind, self.device, _START_SECONDS) as locked:
            if not locked:
                raise UnavailableError(f"Another process has timed kernels on this machine for {_START_SECONDS:g} s.")
            return self._begin()

    def _begin(self) -> dict[str, Any]:
        """Do the work of `begin` while holding the device lock."""
        from tilewise.tune.measure.collector import balanced

        if self.campaign.kind == "cpu":
            self._collector = self._make_collector(self.campaign.build_kernels(), self.campaign.minutes)
            machine = self._collector.begin()
            self.run, kernels = self._collector.run_number, self._collector.requested
        else:
            machine, kernels = self._gpu_machine(), self.campaign.build_kernels()
            self.run = self.store.begin(machine, self.campaign.seed, {"campaign": True})
        queued = self.store.plan(balanced(kernels, self.campaign.seed))
        return {"machine": machine.partition, "run": self.run, "queued": queued, "process": os.getpid()}

    def step(self) -> dict[str, Any]:
        """Measure the next kernel, or the next chunk of kernels on a GPU, and return what was measured.

        The state is `measured`; `busy` if another process uses the device; `waiting` if other actors hold all
        remaining kernels; or `done` if the queue is empty.
        """
        start = time.monotonic()
        with exclusive_device(self.campaign.kind, self.device, _LOCK_SECONDS) as locked:
            if not locked:
                return {"state": "busy"}
            kernels = self._claim_kernels()
            if not kernels:
                return {"state": "waiting" if self.store.queue_length() else "done"}
            self._measure(kernels)
        results = [self._finish_or_requeue(kernel) for kernel in kernels]
        seconds = time.monotonic() - start
        failures, self._failures = self._failures, []
        return {"state": "measured", "kernels": results, "seconds": seconds, "failures": failures[:5]}

    def close(self) -> None:
        """Release the claims of this actor, and close the store."""
        self.store.release_run(self.run)
        self.store.close()

    def _claim_kernels(self) -> list[Kernel]:
        """Claim the next kernel of the queue (on a GPU several), so that no other slot measures it."""
        kernels: list[Kernel] = []
        while len(kernels) < (1 if self.campaign.kind == "cpu" else _GPU_CHUNK):
            kernel = self.store.claim_next(self.run)
            if kernel is None:
                break
            kernels.append(kernel)
        return kernels

    def _measure(self, kernels: Sequence[Kernel]) -> None:
        """Time kernels with the collector, which stores the runtimes, and record failures."""
        if self._collector is not None:
            self._collector.deadline = time.monotonic() + 600
            self._collector.measure(kernels[0])
            tallies = self._collector.tallies
        else:
            tallies = self._make_collector(kernels, 60.0).run()
        for tally in tallies.values():
            self._failures += tally.failures
            tally.failures = []

    def _finish_or_requeue(self, kernel: Kernel) -> dict[str, Any]:
        """Report a finished kernel; postpone an unfinished one, or drop it after too many attempts."""
        counts = {"name": kernel.name, "family": kernel.problem.family}
        if self.store.default_config(kernel) is not None:
            pairs = {key for batch in self.store.batches(kernel) for key in batch.runtime_ns}
            return {**counts, "finished": True, "pairs": len(pairs)}
        self._attempts[kernel.problem.key] += 1
        attempts = self._attempts[kernel.problem.key]
        self.store.release(kernel)
        failed = any(kernel.name in failure for failure in self._failures)
        if attempts >= (MAX_ATTEMPTS if failed else MAX_DISTURBED_ATTEMPTS):
            self._failures.append(f"{kernel.name}: given up after {attempts} attempts")
            self.store.dequeue(kernel)
        else:
            self.store.postpone(kernel)
        return {**counts, "finished": False, "pairs": 0}

    def _make_collector(self, kernels: Sequence[Kernel], minutes: float) -> Any:
        """Make a collector that measures these kernels for at most `minutes`."""
        from tilewise.tune.measure.collector import make_collector

        plan = self.campaign
        options = {"minutes": minutes, "seed": plan.seed, "device": plan.device, "plugins": tuple(plan.plugins)}
        return make_collector(plan.kind, kernels, self.store, plan.configs, self._ignore_progress, **options)

    def _gpu_machine(self) -> Any:
        """Return the GPU (or Triton's interpreter) as the `Machine` that measurements are stored under."""
        from tilewise.profile.timing.gpu import GpuWatch
        from tilewise.store.problem import Machine

        if self.campaign.device == "interpreter":
            return Machine("triton-interpreter", "Triton interpreter", {"name": "Triton interpreter"})
        name = GpuWatch().name()
        return Machine("triton", name, {"name": name})

    def _ignore_progress(self, line: str) -> None:
        """Discard a progress line of the collector, as an actor has no terminal."""
