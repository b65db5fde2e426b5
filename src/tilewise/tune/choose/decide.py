"""The decision procedure shared by the tuner, `autotune`, GPU products and the tuning service.

`decide` receives a problem, its configurations (the default first), and up to three sources of information:

    memory    choices and measurements of earlier runs on this machine
    scores    of the configurations by a model, with their reliability
    measure   a trial that times one configuration, or a few interleaved

1. A cached choice is returned as it is.
2. Without a trial, the configuration with the best score is chosen if it promises more than the model's margin over the
   default.
3. Otherwise configurations are measured one by one: on a GPU in the order of the scores, on a CPU by expected
   improvement of a Gaussian process (`search/gaussian_process.py`). Its prior mean is the scores or, without a model,
   the runtimes of other problems of the same kernel.
4. The configurations within noise of the fastest are timed again, interleaved. The fastest of them is chosen unless the
   default is as fast.
5. If the device can confirm a choice (`measure/confirm.py`), the winner and the default are timed once more on fresh
   data, and the default stays unless the interval of the gain excludes zero.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.memory import Memory, sizes_of
from tilewise.tune.families.space import space_of
from tilewise.tune.measure import Trial
from tilewise.tune.search.confidence import Claim
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters, Numbers

if TYPE_CHECKING:
    from tilewise.tune.measure.confirm import ConfirmedGain

BUDGET = 5  # default number of measurements per problem; the report of `tune --check` calls it "five"
# The prior without a model: information comes only from other configurations and other problems of the same kernel.
WITHOUT_MODEL = Hyperparameters()
FIRST_PROBLEMS = 3  # problems of a kernel that are always measured; arbitrary
_DEFAULT_LEAD = 0.05  # log runtime; prior advantage of the default over configurations nothing is known about
_NOISE, _MAX_FINALISTS = 0.04, 4  # log runtime; single readings this close are timed again; how many at most
_MIN_GAIN = 0.005  # log runtime; smaller gains over the default cannot be told from noise
_NEGLIGIBLE_LOSS = 0.01  # expected loss in log runtime below which a problem is not measured at all


@dataclass(frozen=True, eq=False)
class Scores:
    """A cost model's scores for a problem's configurations, in the same order; lower is faster."""

    hyper: Hyperparameters
    values: Numbers
    margin: float = 0.0  # log runtime; predicted gain over the default that an unmeasured choice must exceed


def decide(
    problem: Problem,
    configs: Sequence[Config],
    scores: Scores | None = None,
    memory: Memory | None = None,
    measure: Trial | None = None,
    *,
    budget: int = BUDGET,
    worth: float = 0.0,
    least: int = 1,
    fresh: bool = False,
    usable: Callable[[Config], bool] = lambda config: True,
    confirm: Callable[[Config], ConfirmedGain | None] = lambda config: None,
    report: Callable[[SearchStep, Config], None] = lambda step, config: None,
) -> Decision:
    """Choose a configuration for a problem: from the cache, by measuring a few, or by the model's scores alone.

    At most `budget` configurations are measured, fewer if the remaining ones are expected to save less than `worth`. If
    `least` is 0 and earlier measurements of similar problems leave no doubt, none is measured. `fresh` ignores a cached
    choice. Only a configuration for which `usable` returns True is chosen. `confirm` compares the winner with the
    default independently of the search; None means that it cannot.
    """
    cached = None if memory is None or fresh else memory.cached_choice(problem, configs)
    if cached is not None:
        return cached
    start = time.perf_counter()
    if measure is None:
        return _unmeasured(problem, configs, scores, usable, start)
    process = _make_process(problem, configs, scores, memory)
    if not least and process.tasks >= FIRST_PROBLEMS and process.value_of_information() < _NEGLIGIBLE_LOSS:
        first = process.first() or 0
        reason = f"known well enough from {process.tasks} other problems"
        return Decision(problem, configs[first], "model", seconds=time.perf_counter() - start, reason=reason)
    searching = _MeasuredSearch(problem, configs, process, measure, report)
    return _confirmed(searching.run(budget, worth, usable, start), configs[0], confirm, start)


def _confirmed(
    decision: Decision, default: Config, confirm: Callable[[Config], ConfirmedGain | None], start: float
) -> Decision:
    """Return the decision if `confirm` finds a gain beyond noise over the default, else one for the default."""
    gain = confirm(decision.config) if decision.config != default else None
    if gain is None:
        return decision
    default_ns = decision.default_ns or (decision.runtime_ns or 1.0) * gain.ratio
    config, runtime_ns, notes = decision.config, default_ns / gain.ratio, list(decision.notes)
    if gain.on_busy_machine:
        notes.append(f"this machine is busy: other programs disturbed the timings by {gain.elsewhere:.0%}")
    if not gain.excludes_zero:
        config, runtime_ns = default, default_ns
        notes.append(f"the fastest reading was not confirmed: {gain} of the default's speed when both were timed again")
    return replace(
        decision,
        config=config,
        runtime_ns=runtime_ns,
        default_ns=default_ns,
        seconds=time.perf_counter() - start,
        notes=notes,
        gain=gain,
    )


def _unmeasured(
    problem: Problem, configs: Sequence[Config], scores: Scores | None, usable: Callable[[Config], bool], start: float
) -> Decision:
    """Choose by the scores alone; the default if no usable configuration is predicted faster by the margin."""
    reason = ""
    if scores is not None and len(configs) > 1:
        values = scores.values
        for index in _best_first(values):
            if not index or scores.hyper.coefficient * float(values[0] - values[index]) < scores.margin:
                reason = f"no configuration is expected to be more than {scores.margin:.1%} faster than the default"
                break
            if usable(configs[index]):
                return Decision(problem, configs[index], "model", seconds=time.perf_counter() - start)
    return Decision(problem, configs[0], "default", seconds=time.perf_counter() - start, reason=reason)


def _best_first(scores: Numbers) -> Iterator[int]:
    """Yield indices in the order of their scores, sorted lazily because only the first few are needed."""
    best = int(np.argmin(scores))
    yield best
    yield from (int(index) for index in np.argsort(scores, kind="stable") if index != best)


def _make_process(
    problem: Problem, configs: Sequence[Config], scores: Scores | None, memory: Memory | None
) -> GaussianProcess:
    """Build the Gaussian process over a problem's configurations, before any measurement.

    A model trained on thousands of shapes makes errors that do not correlate between shapes, so measurements of other
    problems are used only without such a model.
    """
    space, hyper = space_of(configs), WITHOUT_MODEL if scores is None else scores.hyper
    earlier = None if memory is None or not hyper.near else memory.earlier(problem, space.names)
    if scores is not None:
        values = scores.values
    else:
        values = np.full(len(configs), _DEFAULT_LEAD if earlier is None else 0.0)
        values[:1] = 0.0
    return GaussianProcess(values, space.scaled(hyper.ard), hyper, earlier, sizes_of(problem))


class _MeasuredSearch:
    """The search for one problem's best configuration by measurements."""

    def __init__(
        self,
        problem: Problem,
        configs: Sequence[Config],
        process: GaussianProcess,
        measure: Trial,
        report: Callable[[SearchStep, Config], None],
    ) -> None:
        """Store the problem, its configurations, the Gaussian process and the trial."""
        self.problem, self.configs, self.process, self.measure, self.report = problem, configs, process, measure, report
        self.default_ns: float | None = None
        self.notes: list[str] = []
        self.failure_reasons: list[str] = []  # one entry per configuration that could not be measured

    def run(self, budget: int, worth: float, usable: Callable[[Config], bool], start: float) -> Decision:
        """Measure at most `budget` configurations, fewer if the rest saves less than `worth`; time finalists again."""
        claim = Claim(self.process)
        within5 = claim.after(0)
        readings = 0

        def on_step(step: SearchStep) -> None:
            """Update the confidence claim after a measurement, and report it."""
            nonlocal within5, readings
            readings += step.runtime_ns is not None
            within5 = claim.after(readings)
            self.report(step, self.configs[step.index])

        steps, reason = search(self.process, self._measure_one, budget, worth, on_step)
        best, runtime_ns = self._best(usable)
        source = "measured" if self.process.log_runtimes else "default"
        failures = Counter(self.failure_reasons).items()
        words = {True: "configuration is", False: "configurations are"}
        omissions = [f"{count} {words[count == 1]} left out: {why}" for why, count in failures]
        return Decision(
            problem=self.problem,
            config=self.configs[best],
            source=source,
            runtime_ns=runtime_ns,
            default_ns=self.default_ns,
            measurements=len(steps),
            sure=self.process.exhausted,
            within5=self.process.exhausted or within5,
            seconds=time.perf_counter() - start,
            reason=reason,
            steps=steps,
            notes=[*omissions, *self.notes],
        )

    def _measure_one(self, index: int) -> float | None:
        """Time configuration `index` in ns, None if it fails; also record the default's time if measured with it."""
        trial = self.measure.measure(self.configs[index])
        if trial.default_ns is not None:
            self.default_ns = trial.default_ns
            if index and 0 not in self.process.log_runtimes:
                self.process.observe(0, math.log(trial.default_ns))
        if trial.runtime_ns is None:
            self.failure_reasons.append(trial.reason)
        return trial.runtime_ns

    def _best(self, usable: Callable[[Config], bool]) -> tuple[int, float | None]:
        """Return index and ns of the fastest usable configuration; the default's if none is faster."""
        runtimes = {
            index: math.exp(logs) for index, logs in self.process.log_runtimes.items()
        } | self._repeated_runtimes()
        if not runtimes:
            return 0, self.default_ns
        default_ns = runtimes.get(0, self.default_ns)
        for index in sorted(runtimes, key=lambda index: (runtimes[index], index)):
            if default_ns is not None and runtimes[index] > default_ns * (1 - _MIN_GAIN):
                return 0, default_ns  # within noise; the default has the shortest code path
            if not index or usable(self.configs[index]):
                return index, runtimes[index]
            self.notes.append("the fastest loses at another thread count, where it would be used as well")
        return 0, default_ns

    def _repeated_runtimes(self) -> dict[int, float]:
        """Time configurations within noise of the fastest again, to avoid a lucky minimum; ns by index."""
        log_runtimes, best = self.process.log_runtimes, self.process.best
        if best is None:
            return {}
        close = [index for index, logs in log_runtimes.items() if logs - log_runtimes[best] < _NOISE]
        close = sorted(close, key=log_runtimes.__getitem__)[:_MAX_FINALISTS]
        if len(close) < 2:
            return {}
        again = self.measure.remeasure([self.configs[index] for index in close])
        return {i: ns for i, ns in zip(close, again, strict=True) if ns is not None and 0 < ns < math.inf}


@dataclass(frozen=True)
class SearchStep:
    """One measurement; `runtime_ns` is None if the configuration failed."""

    index: int
    runtime_ns: float | None


def search(
    process: GaussianProcess,
    measure: Callable[[int], float | None],
    budget: int = BUDGET,
    worth: float = 0.0,
    report: Callable[[SearchStep], None] = lambda step: None,
) -> tuple[list[SearchStep], str]:
    """Measure configurations until the budget is spent or knowing all others would save less than `worth`.

    `measure(index)` returns nanoseconds, from a run or a recording, or None for a failure. Returns the measurements in
    order and the reason for stopping; `process.best` is the fastest. The search is deterministic, given the times.
    """
    steps: list[SearchStep] = []
    reason = f"the budget of {budget} is spent"
    while len(steps) < budget:
        index = process.next()
        if index is None:
            reason = "every promising configuration is measured"
            break
        runtime_ns = measure(index)
        # A failed configuration or an impossible time only removes the candidate.
        if runtime_ns is not None and 0 < runtime_ns < math.inf:
            process.observe(index, math.log(runtime_ns))
        else:
            runtime_ns = None
            process.refuse(index)
        steps.append(SearchStep(index, runtime_ns))
        report(steps[-1])
        # Stop early if even perfect information would save less than `worth`.
        if worth and process.best is not None and process.value_of_information() < worth:
            reason = "the rest cannot pay"
            break
    if process.best is None:
        reason = "no configuration could be measured"
    return steps, reason
