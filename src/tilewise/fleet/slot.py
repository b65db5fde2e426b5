"""One device of a cluster at work: an actor that takes kernels from the store's queue and measures them.

What is timed on a machine is timed alone: a lock in the temporary folder keeps apart actors of other drivers, of other
nodes on the same machine and of other clusters. It is taken before a kernel is claimed, so that a claim never waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.tune.measure.store import Store
from tilewise.tune.problem import Kernel, Problem, Value

MOST_ATTEMPTS = 3
_LOCK_SECONDS = 2.0  # before the driver hears that the device is busy
_CHUNK = 16  # kernels whose binaries a GPU's collector compiles in one go


@dataclass(frozen=True)
class Campaign:
    """What every slot is told; plain values, which travel."""

    store: str
    kind: str
    kernels: tuple[tuple[str, Mapping[str, Value]], ...]
    seed: int = 0
    configs: int | None = None
    device: str = "cuda"
    plugins: tuple[str, ...] = ()
    minutes: float = 60.0

    def planned(self) -> list[Kernel]:
        return [Kernel(program, Problem(problem)) for program, problem in self.kernels]


class Slot:
    """The work of an actor: `begin`, then `step` again and again."""

    def __init__(self, campaign: Campaign) -> None:
        from tilewise.tune.measure.collect import load_plugins

        load_plugins(campaign.plugins)
        self.campaign = campaign
        self.store = Store(campaign.store)
        self._attempts: Counter[str] = Counter()
        self._collector: Any = None
        self._failures: list[str] = []
        self.run = 0

    def begin(self) -> dict[str, Any]:
        """Open a run, and queue what this machine's part of the store lacks."""
        collector = self._cpu() if self.campaign.kind == "cpu" else None
        if collector is not None:
            self._collector = collector
            machine = collector.begin()
            self.run, wanted = collector.run_number, collector.wanted
        else:
            machine, wanted = self._gpu_machine(), self.campaign.planned()
            self.run = self.store.begin(machine, self.campaign.seed, {"campaign": True})
        from tilewise.tune.measure.schedule import balanced

        added = self.store.plan(balanced(wanted, self.campaign.seed))
        return {"machine": machine.part, "run": self.run, "queued": added, "process": os.getpid()}

    def step(self) -> dict[str, Any]:
        """Measure the next kernel (a GPU: the next few); says what came of it, or that nothing is left or free."""
        start = time.monotonic()
        with self._alone() as alone:
            if not alone:
                return {"state": "busy"}
            taken = self._take()
            if not taken:
                return {"state": "waiting" if self.store.waiting() else "done"}
            self._measure(taken)
        done = [self._after(kernel) for kernel in taken]
        seconds = time.monotonic() - start
        failures, self._failures = self._failures, []
        return {"state": "measured", "kernels": done, "seconds": seconds, "failures": failures[:5]}

    def close(self) -> None:
        self.store.release_run(self.run)
        self.store.close()

    def _take(self) -> list[Kernel]:
        """Claim the next kernel, or, for a GPU, the next few."""
        found: list[Kernel] = []
        while len(found) < (1 if self.campaign.kind == "cpu" else _CHUNK):
            kernel = self.store.claim_next(self.run)
            if kernel is None:
                break
            found.append(kernel)
        return found

    def _measure(self, kernels: Sequence[Kernel]) -> None:
        if self._collector is not None:
            self._collector.deadline = time.monotonic() + 600
            self._collector.measure(kernels[0])
            tallies = self._collector.tallies
        else:
            tallies = self._gpu(kernels).run()
        for tally in tallies.values():
            self._failures += tally.failures
            tally.failures = []

    def _after(self, kernel: Kernel) -> dict[str, Any]:
        """Whether it is finished; what is not comes again later, and after a few times no more."""
        counts = {"name": kernel.name, "family": kernel.problem.family}
        if self.store.default_config(kernel) is not None:
            pairs = {key for batch in self.store.batches(kernel) for key in batch.runtime_ns}
            return {**counts, "finished": True, "pairs": len(pairs)}
        self._attempts[kernel.problem.key] += 1
        self.store.release(kernel)
        if self._attempts[kernel.problem.key] >= MOST_ATTEMPTS:
            self.store.unplan(kernel)
        else:
            self.store.postpone(kernel)
        return {**counts, "finished": False, "pairs": 0}

    def _cpu(self) -> Any:
        from tilewise.tune.measure.cpu.collector import CpuCollector, CpuOptions

        options = CpuOptions(minutes=self.campaign.minutes, seed=self.campaign.seed)
        if self.campaign.configs is not None:
            options.max_configs = self.campaign.configs
        return CpuCollector(self.campaign.planned(), self.store, options, self._note)

    def _gpu(self, kernels: Sequence[Kernel]) -> Any:
        from tilewise.tune.measure.collect import triton_collector

        plan, note = self.campaign, self._note
        options = (60.0, plan.seed, plan.configs, plan.device, plan.plugins, False)
        return triton_collector(kernels, self.store, *options, note)

    def _gpu_machine(self) -> Any:
        from tilewise.tune.measure.store import Machine
        from tilewise.tune.measure.triton.nvml import GpuWatch

        if self.campaign.device == "interpreter":
            return Machine("triton-interpreter", "Triton interpreter", {"name": "Triton interpreter"})
        name = GpuWatch().name()
        return Machine("triton", name, {"name": name})

    def _note(self, line: str) -> None:
        """What a collector says belongs to a terminal that an actor does not have."""

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """The machine's lock, if it is free within a moment; a process that dies gives it back."""
        path = Path(tempfile.gettempdir()) / f"tilewise-timing-{os.getuid()}.lock"
        with path.open("a") as lock:
            until = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > until:
                        yield False
                        return
                    time.sleep(0.005)
            yield True
