"""`Tuner`: find the best configuration of a problem on this machine with a few measurements.

The tuner opens the inputs of a decision (`decide.py`): the machine's cache of choices and its store, the cost model,
and a trial that measures. Every measurement goes to the store, where later searches use it; every choice goes to a file
that other processes read.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Kernel, Problem, Value
from tilewise.store.service import ServiceClient
from tilewise.store.store import Store, Verdict
from tilewise.tune.choose.cache import ChoiceFile, Decision, cache_folder
from tilewise.tune.choose.decide import BUDGET, Scores, SearchStep, decide
from tilewise.tune.choose.memory import Memory
from tilewise.tune.choose.scores import UNCALIBRATED_GPU, ModelScores, file_scores, shipped_scores
from tilewise.tune.families.registry import find_family
from tilewise.tune.measure import Trial, TrialResult
from tilewise.tune.measure.device import TuningDevice

PROGRAM = "tuned"
_NOISE = 0.01  # relative difference of two readings on a CPU
_WAIT_SECONDS = 120.0  # limit of waiting for another process that tunes the same problem; arbitrary
Tuned = Decision


class Tuner:
    """Tunes problems of one machine, "cpu" or "triton".

    `cache` is the folder of choices and measurements (default: the user's cache folder), `model` a model file that
    replaces the shipped one, `budget` the number of configurations measured per problem. With `limit_s`, they run in
    a separate process, so a configuration may crash or hang; it is given up after that many seconds. `service`
    is the address of a `tilewise fleet serve`, which is asked first and receives the measurements; if it does not
    answer within 50 ms, the tuner continues without it.

    >>> Tuner().tune({"family": "matmul", "m": 512, "n": 4096, "k": 1024}).config  # doctest: +SKIP
    """

    def __init__(
        self,
        device: str | TuningDevice = "cpu",
        *,
        model: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        budget: int | None = None,
        limit_s: float | None = None,
        service: str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Open the device, the cost model and the cache; notes about them are passed to `say`."""
        if budget is not None and budget < 1:
            raise ConfigurationError(f"budget must be at least 1 measurement, not {budget}.")
        self.device = open_device(device, limit_s) if isinstance(device, str) else device
        self.folder = Path(cache).expanduser() if cache is not None else cache_folder()
        self.budget, self._say = budget or BUDGET, say
        self._notes: set[str] = set()
        self.model = self._model(model)
        identity = self.device.machine
        self.memory = Memory(self.folder, identity, self.device.version, self.store_file, self._note)
        self.service = None if service is None else ServiceClient(service, identity, self._note)
        self._note(*self.choices.notes)

    def _model(self, model: str | os.PathLike[str] | None) -> ModelScores | None:
        """Load the model in a file, or the shipped one; None if there is none for this hardware."""
        device, note = self.device, ""
        if model is not None:
            scores: ModelScores | None = file_scores(Path(model), device.kind, device.margin)
        else:
            identity, own = device.machine.identity, device.own_model
            scores, note = shipped_scores(device.collection, identity, device.kind, device.margin, own=own)
        self._note(*([note] if scores is None else scores.notes))
        return scores

    @property
    def choices(self) -> ChoiceFile:
        return self.memory.choices

    @property
    def _choices_name(self) -> str:
        """Name of this machine's choices file, without suffix."""
        identity = hashlib.sha256(self.device.machine.identity.encode()).hexdigest()[:12]
        return f"{self.device.kind}-{identity}"

    @property
    def store_file(self) -> Path:
        """Path of the database of this machine's measurements."""
        return self.folder / f"{self._choices_name}.sqlite"

    def _note(self, *lines: str) -> None:
        """Pass lines to `say`, each text only once."""
        for line in lines:
            if line not in self._notes:
                self._notes.add(line)
                self._say(line)

    # Choosing

    def problem(self, spec: Problem | Mapping[str, Value]) -> Problem:
        """Check a problem's specification and fill in its defaults."""
        return spec if isinstance(spec, Problem) else self.device.problem(spec)

    def choose(self, spec: Problem | Mapping[str, Value]) -> Decision:
        """Choose a configuration without measuring: from the cache, else the service, the model, or the default."""
        problem, start = self.problem(spec), time.perf_counter()
        cached = self.choices.get(problem, lambda config: config in self.device.configs(problem))
        if cached is not None:
            return cached
        if self.service is not None:
            # Ask for measured configurations first: they need not be among the candidates of an unmeasured choice.
            choice = self._service_choice(problem, None, start)
            choice = choice or self._service_choice(problem, self.device.candidates(problem), start)
            if choice is not None:
                return choice
        if self.model is None:
            return decide(problem, [self.device.default(problem)])
        candidates = self.device.candidates(problem)
        scores = self._score_configs(problem, candidates)
        return decide(problem, candidates, scores, usable=lambda config: self.device.runs(problem, config))

    def _score_configs(self, problem: Problem, configs: Sequence[Config]) -> Scores | None:
        """Score configurations by the model, or by the family's own ranker if it has one; None without either."""
        rank = getattr(find_family(self.device.kind, problem.family), "rank", None)
        if rank is None:
            return None if self.model is None else self.model.rank(problem, configs)
        return Scores(UNCALIBRATED_GPU, rank(problem, configs, self.device.machine.identity))

    def _service_choice(self, problem: Problem, configs: Sequence[Config] | None, start: float) -> Decision | None:
        """Ask the service to choose among `configs` (None: those it has measured); None without an answer."""
        answer = None if self.service is None else self.service.choose(problem, configs and list(configs))
        if answer is None or answer.source not in ("measured", "model"):
            return None
        valid = configs or self.device.configs(problem)
        if answer.config not in valid or not self.device.runs(problem, answer.config):
            return None
        return Decision(
            problem,
            answer.config,
            "service",
            answer.runtime_ns,
            measurements=answer.measurements,
            seconds=time.perf_counter() - start,
            reason=answer.reason,
        )

    # Tuning

    def tune(
        self,
        spec: Problem | Mapping[str, Value],
        *,
        budget: int | None = None,
        fresh: bool = False,
        report: Callable[[SearchStep, Config], None] = lambda step, config: None,
    ) -> Decision:
        """Choose with at most `budget` measurements and store the choice. `fresh` ignores a cached choice."""
        problem, start = self.problem(spec), time.perf_counter()
        configs = self.device.configs(problem)
        cached = None if fresh else self.memory.cached_choice(problem, configs)
        if cached is not None:
            return cached
        choice = None if fresh else self._service_choice(problem, None, start)
        if choice is not None and choice.measurements and choice.config in configs:
            return choice
        with self.memory.open_store() as store:
            run = store.begin(self.device.machine, 0, {"tuner": True, "model": self.model.name if self.model else ""})
            kernel = Kernel(PROGRAM, problem)
            if not store.claim(run, kernel):
                choice = self._wait_for_other(problem, configs)
                if choice is not None:
                    return choice
            decision = self._decide(problem, configs, store, run, budget or self.budget, report)
            store.release(kernel)
        gain = decision.gain
        # If a busy machine prevented a decision, the next call tunes the problem again.
        is_undecided = gain is not None and gain.on_busy_machine and not gain.excludes_zero
        if decision.source == "measured" and decision.runtime_ns is not None and not is_undecided:
            self.choices.put(decision)
        self._note(*decision.notes, *self.choices.notes)
        return decision

    def _decide(
        self,
        problem: Problem,
        configs: Sequence[Config],
        store: Store,
        run: int,
        budget: int,
        report: Callable[[SearchStep, Config], None],
    ) -> Decision:
        """Search a problem's configurations with at most `budget` measurements, which are written to the store."""
        with self.device.trial(problem, configs[0]) as trial:
            return decide(
                problem,
                configs,
                self._score_configs(problem, configs),
                self.memory,
                _RecordingTrial(trial, store, run, Kernel(PROGRAM, problem), self.service),
                budget=budget,
                fresh=True,
                usable=lambda config: self._is_safe_elsewhere(problem, config),
                confirm=lambda config: self.device.confirm(problem, config),
                report=report,
            )

    def _is_safe_elsewhere(self, problem: Problem, config: Config) -> bool:
        """Tell whether a tile is at least as fast as the default for other problems that would use it."""
        gains = (self.device.confirm(there, tile) for there, tile in self.device.elsewhere(problem, config))
        return all(gain is not None and gain.ratio > 1 - _NOISE for gain in gains)

    def _wait_for_other(self, problem: Problem, configs: Sequence[Config]) -> Decision | None:
        """Wait until another process has tuned this problem and return its choice; None after a time limit."""
        self._note(f"another process is tuning {problem.key}; waiting for its choice")
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until:
            time.sleep(0.1)
            choice = self.memory.cached_choice(problem, configs)
            if choice is not None:
                return choice
        return None


class _RecordingTrial:
    """Measures through another trial, and writes every result to the store and the service."""

    def __init__(
        self, trial: Trial, store: Store, run: int, kernel: Kernel, service: ServiceClient | None = None
    ) -> None:
        self._trial, self._store, self._run, self._kernel, self._service = trial, store, run, kernel, service

    def measure(self, config: Config) -> TrialResult:
        """Measure a configuration; store its runtime and whether it was correct."""
        trial_result = self._trial.measure(config)
        self._store.add_verdicts(self._run, self._kernel, [Verdict(config, trial_result.status, trial_result.reason)])
        if trial_result.runtime_ns is not None:
            default_ns = trial_result.default_ns or trial_result.runtime_ns
            self._store.add_batch(self._run, self._kernel, 0, default_ns, [(config, trial_result.runtime_ns)])
            if self._service is not None:
                self._service.report(self._kernel.problem, default_ns, [(config, trial_result.runtime_ns)])
        return trial_result

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        return self._trial.remeasure(configs)


def open_device(device: str, limit_s: float | None = None) -> TuningDevice:
    """Open the device called "cpu" or "triton"."""
    if device == "cpu":
        from tilewise.tune.measure.cpu.device import CpuDevice

        return CpuDevice(limit_s)
    if device == "triton":
        from tilewise.gpu.measure.triton_device import TritonDevice

        return TritonDevice()
    raise ConfigurationError(f"There is no device {device!r} to tune on; use cpu or triton.")


# `tune --check` compares the tuner's choices with an exhaustive search. The leaders of the sweep and the choices then
# run interleaved, and only this final comparison is reported. A ratio of 1 means the fastest of all.
_FINALISTS = 8  # leaders of the sweep that are timed again; arbitrary


def check(
    problems: Sequence[Mapping[str, Value]],
    device: str | TuningDevice = "cpu",
    *,
    model: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compare the tuner's choices with an exhaustive search on a list of problems.

    The result has `problems` (one row each, see `check_one`), the geometric means of their ratios, and `time_ratio`:
    seconds of the exhaustive search divided by seconds of five measurements.
    """
    if not problems:
        raise ConfigurationError("There is no problem to check.")
    with tempfile.TemporaryDirectory(prefix="tilewise-check-") as folder:
        notes: list[str] = []
        tuner = Tuner(device, model=model, cache=folder, say=notes.append)
        rows = []
        for number, spec in enumerate(problems, start=1):
            # Each problem starts from an empty cache, so that no shape profits from measurements of another.
            fresh_tuner = Tuner(tuner.device, model=model, cache=f"{folder}/{number}")
            row = check_one(fresh_tuner, fresh_tuner.problem(spec))
            rows.append(row)
            say(
                f"{number}/{len(problems)} {row['problem']}: first {row['first']:.3f}, five {row['five']:.3f}, default "
                f"{row['default']:.3f}; {row['five_seconds']:.2f} s against {row['exhaustive_seconds']:.2f} s"
            )
    means = {kind: _geometric_mean([row[kind] for row in rows]) for kind in ("first", "five", "default")}
    ratio = _geometric_mean([row["exhaustive_seconds"] / row["five_seconds"] for row in rows])
    device_info = {"device": tuner.device.kind, "machine": tuner.device.machine.identity}
    return {**device_info, "problems": rows, **means, "time_ratio": ratio, "notes": notes}


def check_one(tuner: Tuner, problem: Problem) -> dict[str, Any]:
    """Compare one problem's choices with exhaustive search, with an empty cache: fastest / chosen time, and seconds."""
    configs = list(tuner.device.configs(problem))
    first = tuner.choose(problem).config
    tuner.device.forget()
    start = time.perf_counter()
    five = tuner.tune(problem, budget=BUDGET).config
    five_seconds = time.perf_counter() - start
    sweep_ns, exhaustive_seconds = tuner.device.sweep(problem, configs)
    leaders = sorted(sweep_ns, key=sweep_ns.__getitem__)[:_FINALISTS]
    with tuner.device.trial(problem, configs[0]) as trial:
        finalists = dict.fromkeys([configs[0], first, five, *leaders])
        runnable = [config for config in finalists if trial.measure(config).runtime_ns is not None]
        times = zip(runnable, trial.remeasure(runnable), strict=True)
    runtime = {config: ns for config, ns in times if ns is not None}
    best_ns = min(runtime.values())

    def ratio(config: Config) -> float:
        """Return the fastest time divided by this configuration's."""
        return best_ns / runtime[config] if config in runtime else 0.0

    ratios = {"first": ratio(first), "five": ratio(five), "default": ratio(configs[0])}
    seconds = {"five_seconds": five_seconds, "exhaustive_seconds": exhaustive_seconds}
    return {"problem": dict(problem), "configs": len(configs), "best_ns": best_ns, **ratios, **seconds}


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(ratio, 1e-9)) for ratio in ratios) / len(ratios))
