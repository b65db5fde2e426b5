"""One device of a cluster at work: an actor that takes kernels from the store's queue and measures them.

What is timed is timed alone on its machine (see `alone.py`), whichever driver, node or cluster an actor belongs to. The
lock is taken before a kernel is claimed, so that a claim never waits.
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
from tilewise_fleet.alone import alone

MOST_ATTEMPTS, MOST_DISTURBED = 3, 20  # of a kernel that fails, and of one while something else kept the machine busy
_LOCK_SECONDS = 2.0  # before the driver hears that the device is busy
_START_SECONDS = 300.0  # a machine's ceilings are measured at the start, alone as well: the others are waited for
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

    def __init__(self, campaign: Campaign, device: int = 0, devices: int = 1) -> None:
        from tilewise.tune.measure.collect import load_plugins

        if devices > 1:  # of a node with several GPUs, one is this actor's
            named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = named[device] if len(named) >= devices else str(device)
        load_plugins(campaign.plugins)
        self.campaign, self.device = campaign, device
        self.store = Store(campaign.store)
        self._attempts: Counter[str] = Counter()
        self._collector: Any = None
        self._failures: list[str] = []
        self.run = 0

    def begin(self) -> dict[str, Any]:
        """Open a run, and queue what this machine's part of the store lacks."""
        with alone(self.campaign.kind, self.device, _START_SECONDS) as free:
            if not free:
                raise UnavailableError(f"Something else has been timed on this machine for {_START_SECONDS:g} s.")
            return self._begin()

    def _begin(self) -> dict[str, Any]:
        collector = self._make(self.campaign.planned(), self.campaign.minutes) if self.campaign.kind == "cpu" else None
        if collector is not None:
            self._collector = collector
            machine = collector.begin()
            self.run, wanted = collector.run_number, collector.wanted
        else:
            machine, wanted = self._gpu_machine(), self.campaign.planned()
            self.run = self.store.begin(machine, self.campaign.seed, {"campaign": True})
        from tilewise.tune.measure.schedule import balanced

        added = self.store.plan(balanced(wanted, self.campaign.seed))
        return {"machine": machine.partition, "run": self.run, "queued": added, "process": os.getpid()}

    def step(self) -> dict[str, Any]:
        """Measure the next kernel (a GPU: the next few); says what came of it, or that nothing is left or free."""
        start = time.monotonic()
        with alone(self.campaign.kind, self.device, _LOCK_SECONDS) as free:
            if not free:
                return {"state": "busy"}
            taken = self._take()
            if not taken:
                return {"state": "waiting" if self.store.queue_length() else "done"}
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
            tallies = self._make(kernels, 60.0).run()
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
        failed = any(kernel.name in failure for failure in self._failures)
        if self._attempts[kernel.problem.key] >= (MOST_ATTEMPTS if failed else MOST_DISTURBED):
            self._failures.append(f"{kernel.name}: given up after {self._attempts[kernel.problem.key]} attempts")
            self.store.dequeue(kernel)
        else:
            self.store.postpone(kernel)
        return {**counts, "finished": False, "pairs": 0}

    def _make(self, kernels: Sequence[Kernel], minutes: float) -> Any:
        from tilewise.tune.measure.collect import make_collector

        plan = self.campaign
        options = {"minutes": minutes, "seed": plan.seed, "device": plan.device, "plugins": tuple(plan.plugins)}
        return make_collector(plan.kind, kernels, self.store, plan.configs, self._note, **options)

    def _gpu_machine(self) -> Any:
        from tilewise.profile.timing.nvml import GpuWatch
        from tilewise.store.store import Machine

        if self.campaign.device == "interpreter":
            return Machine("triton-interpreter", "Triton interpreter", {"name": "Triton interpreter"})
        name = GpuWatch().name()
        return Machine("triton", name, {"name": name})

    def _note(self, line: str) -> None:
        """What a collector says belongs to a terminal that an actor does not have."""
