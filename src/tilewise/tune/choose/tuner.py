"""`Tuner`: the best configuration of a problem on this machine, with a few measurements.

It opens what a decision needs (`decide.py`): the machine's cache of choices and its store, the cost model, and a trial
to measure with. Every measurement is kept in the store and teaches the shapes that come after; every choice is kept in
a file that other processes read.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Kernel, Problem, Value
from tilewise.store.service import ServiceClient
from tilewise.store.store import Store, Verdict
from tilewise.tune.choose.cache import Choices, Decision, cache_folder
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.memory import Memory
from tilewise.tune.choose.scores import ModelScores, file_scores, shipped_scores
from tilewise.tune.measure.device import Device
from tilewise.tune.measure.trial import Timed, Trial
from tilewise.tune.search.loop import BUDGET, Step

PROGRAM = "tuned"
_LUCK = 0.01  # as much may be between two readings on a CPU
_WAIT_SECONDS = 120.0  # for another process that tunes the same problem
Tuned = Decision


class Tuner:
    """Tunes problems of one machine, "cpu" or "triton".

    `cache` is the folder of choices and measurements (default: the user's cache folder); `model` a model file in place
    of the shipped one; `budget` the configurations measured a problem; `limit_s` measures in a process of its own
    that a configuration may crash, or hang for so many seconds. With `learn` the model is fine-tuned on what was
    measured here (needs PyTorch). `service` is the address of a `tilewise fleet serve`, which is asked first and
    receives the measurements; without an answer within 50 ms everything goes on as without it.

    >>> Tuner().tune({"family": "matmul", "m": 512, "n": 4096, "k": 1024}).config  # doctest: +SKIP
    """

    def __init__(
        self,
        device: str | Device = "cpu",
        *,
        model: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        budget: int | None = None,
        limit_s: float | None = None,
        learn: bool = False,
        service: str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if budget is not None and budget < 1:
            raise ConfigurationError(f"budget must be at least 1 measurement, not {budget}.")
        self.device = open_device(device, limit_s) if isinstance(device, str) else device
        self.folder = Path(cache).expanduser() if cache is not None else cache_folder()
        self.budget, self.learn, self._said = budget or BUDGET, learn, say
        self._notes: set[str] = set()
        self.model = self._model(model)
        identity = self.device.machine
        self.memory = Memory(
            self.folder, identity, self.device.version, self.store_file, lambda line: self._tell([line])
        )
        self.service = None if service is None else ServiceClient(service, identity, lambda line: self._tell([line]))
        self._tell(self.choices.notes)

    def _model(self, model: str | os.PathLike[str] | None) -> ModelScores | None:
        device, note = self.device, ""
        if model is not None or (self.learn and self.learned_file.is_file()):
            chosen = self.learned_file if model is None else Path(model)
            found: ModelScores | None = file_scores(chosen, device.kind, device.margin)
        else:
            identity, own = device.machine.identity, device.own_model
            found, note = shipped_scores(device.collection, identity, device.kind, device.margin, own=own)
        self._tell([note] if found is None else found.notes)
        return found

    @property
    def choices(self) -> Choices:
        return self.memory.choices

    @property
    def _stem(self) -> str:
        identity = hashlib.sha256(self.device.machine.identity.encode()).hexdigest()[:12]
        return f"{self.device.kind}-{identity}"

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
        return spec if isinstance(spec, Problem) else self.device.problem(spec)

    def choose(self, spec: Problem | Mapping[str, Value]) -> Decision:
        """The choice without measuring anything: kept, else the model's, else the default."""
        problem, start = self.problem(spec), time.perf_counter()
        kept = self.choices.get(problem, lambda config: config in self.device.configs(problem))
        if kept is not None:
            return kept
        if self.service is not None:
            # What others measured may be none of the few that an unmeasured choice is made among.
            measured = self._asked(problem, None, start)
            asked = measured or self._asked(problem, self.device.candidates(problem), start)
            if asked is not None:
                return asked
        if self.model is None:
            return decide(problem, [self.device.default(problem)])
        candidates = self.device.candidates(problem)
        return decide(problem, candidates, self.model, usable=lambda config: self.device.runs(problem, config))

    def _asked(self, problem: Problem, configs: Sequence[Config] | None, start: float) -> Decision | None:
        """The service's choice among `configs`, or, of None, among what others measured; None where it has none."""
        found = None if self.service is None else self.service.choose(problem, configs and list(configs))
        if found is None or found.source not in ("measured", "model"):
            return None
        if found.config not in (configs or self.device.configs(problem)) or not self.device.runs(problem, found.config):
            return None
        return Decision(
            problem, found.config, "service", found.runtime_ns, measurements=found.measurements,
            seconds=time.perf_counter() - start, reason=found.reason,
        )  # fmt: skip

    # Tuning

    def tune(
        self,
        spec: Problem | Mapping[str, Value],
        *,
        budget: int | None = None,
        fresh: bool = False,
        report: Callable[[Step, Config], None] = lambda step, config: None,
    ) -> Decision:
        """Measure as many as the budget says. `fresh` ignores an earlier choice."""
        problem, start = self.problem(spec), time.perf_counter()
        configs = self.device.configs(problem)
        kept = None if fresh else self.memory.kept(problem, configs)
        if kept is not None:
            return kept
        asked = None if fresh else self._asked(problem, None, start)
        if asked is not None and asked.measurements and asked.config in configs:
            return asked
        with self.memory.open_store() as store:
            run = store.begin(self.device.machine, 0, {"tuner": True, "model": self.model.name if self.model else ""})
            kernel = Kernel(PROGRAM, problem)
            if not store.claim(run, kernel):
                found = self._await(problem, configs)
                if found is not None:
                    return found
            decision = self._decide(problem, configs, store, run, budget or self.budget, report)
            store.release(kernel)
        if decision.source == "measured" and decision.runtime_ns is not None:
            self.choices.put(decision)
        self._tell([*decision.notes, *self.choices.notes])
        return decision

    def _decide(
        self,
        problem: Problem,
        configs: Sequence[Config],
        store: Store,
        run: int,
        budget: int,
        report: Callable[[Step, Config], None],
    ) -> Decision:
        with self.device.trial(problem, configs[0]) as trial:
            return decide(
                problem,
                configs,
                self.model,
                self.memory,
                _Kept(trial, store, run, Kernel(PROGRAM, problem), self.service),
                budget=budget,
                fresh=True,
                usable=lambda config: self._holds_elsewhere(problem, config),
                report=report,
            )

    def _holds_elsewhere(self, problem: Problem, config: Config) -> bool:
        """Whether a choice is not slower than the default wherever else it would be used."""
        for there, tile in self.device.elsewhere(problem, config):
            with self.device.trial(there, self.device.default(there)) as trial:
                timed = trial.measure(tile)
            if timed.runtime_ns is None or timed.default_ns is None:
                return False
            if timed.runtime_ns > timed.default_ns * (1 + _LUCK):
                return False
        return True

    def _await(self, problem: Problem, configs: Sequence[Config]) -> Decision | None:
        """Another process tunes this problem now: take its choice when it comes."""
        self._tell([f"another process is tuning {problem.key}; waiting for its choice"])
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until:
            time.sleep(0.1)
            found = self.memory.kept(problem, configs)
            if found is not None:
                return found
        return None


class _Kept:
    """A trial whose every reading and verdict goes to the store."""

    def __init__(
        self, trial: Trial, store: Store, run: int, kernel: Kernel, service: ServiceClient | None = None
    ) -> None:
        self._trial, self._store, self._run, self._kernel, self._service = trial, store, run, kernel, service

    def measure(self, config: Config) -> Timed:
        timed = self._trial.measure(config)
        self._store.add_verdicts(self._run, self._kernel, [Verdict(config, timed.status, timed.reason)])
        if timed.runtime_ns is not None:
            default_ns = timed.default_ns or timed.runtime_ns
            self._store.add_batch(self._run, self._kernel, 0, default_ns, [(config, timed.runtime_ns)])
            if self._service is not None:
                self._service.report(self._kernel.problem, default_ns, [(config, timed.runtime_ns)])
        return timed

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        return self._trial.remeasure(configs)


def open_device(device: str, limit_s: float | None = None) -> Device:
    """The device called "cpu" or "triton"."""
    if device == "cpu":
        from tilewise.tune.measure.cpu.device import CpuDevice

        return CpuDevice(limit_s)
    if device == "triton":
        from tilewise.gpu.measure.triton_device import TritonDevice

        return TritonDevice()
    raise ConfigurationError(f"There is no device {device!r} to tune on; use cpu or triton.")
