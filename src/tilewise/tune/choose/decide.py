"""One decision for the tuner, the framework's chooser, `autotune`, GPU products and the tuning service.

`decide` is given a problem, its configurations (the default first), and up to three things to go by:

    memory    what was chosen and measured before on this machine
    model     scores for the configurations, and how far to trust them
    measure   a way to time one configuration, and a few against each other

A choice that was kept is taken. Where nothing may be measured, the best score is taken if it promises more than the
model's margin over the default. Else configurations are measured one by one: in the order of the scores on a GPU, else
by expected improvement of a Gaussian process (`search/gaussian_process.py` has its page of maths) around the scores or,
without any, around what other problems of the same kernel took. The closest few are timed again, and their fastest is
the choice unless the default is as good.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.memory import Memory, sizes_of
from tilewise.tune.families.space import space_of
from tilewise.tune.measure.trial import Trial
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters, Numbers
from tilewise.tune.search.loop import BUDGET, Step, search
from tilewise.tune.search.surety import Claim

# Without a model everything must come from neighbours: other configurations, and other problems of the same kernel.
WITHOUT_MODEL = Hyperparameters()
FIRST_PROBLEMS = 3  # of a kernel that nothing is known of; only after them may one go unmeasured
_DEFAULT_LEAD = 0.05  # of the default over what is as good by all that is known, in log runtime
_CLOSE, _MOST_CLOSE = 0.04, 4  # log runtimes that one reading each does not tell apart, and how many are timed again
_WORTH = 0.005  # less than this over the default is not told from noise
_CERTAIN = 0.01  # expected loss below which a problem is not measured at all


class Scores(Protocol):
    """What is expected of configurations before any is measured."""

    @property
    def hyper(self) -> Hyperparameters: ...
    @property
    def margin(self) -> float:
        """What a choice must promise over the default, in log runtime, to be taken unmeasured."""

    def scores(self, problem: Problem, configs: Sequence[Config]) -> Numbers:
        """One a configuration, lower is faster."""


def decide(
    problem: Problem,
    configs: Sequence[Config],
    model: Scores | None = None,
    memory: Memory | None = None,
    measure: Trial | None = None,
    *,
    budget: int = BUDGET,
    worth: float = 0.0,
    least: int = 1,
    fresh: bool = False,
    usable: Callable[[Config], bool] = lambda config: True,
    report: Callable[[Step, Config], None] = lambda step, config: None,
) -> Decision:
    """The configuration to use. At most `budget` are measured, fewer where the rest is expected to save less than
    `worth`; none where `least` is 0 and what is remembered leaves no doubt. `fresh` ignores an earlier choice; only a
    `usable` one is taken."""
    kept = None if memory is None or fresh else memory.kept(problem, configs)
    if kept is not None:
        return kept
    start = time.perf_counter()
    if measure is None:
        return _unmeasured(problem, configs, model, usable, start)
    process = _process(problem, configs, model, memory)
    if not least and process.tasks >= FIRST_PROBLEMS and process.value_of_information() < _CERTAIN:
        first = process.first() or 0
        reason = f"known well enough from {process.tasks} other problems"
        return Decision(problem, configs[first], "model", seconds=time.perf_counter() - start, reason=reason)
    return _Measuring(problem, configs, process, measure, report).run(budget, worth, usable, start)


def _unmeasured(
    problem: Problem, configs: Sequence[Config], model: Scores | None, usable: Callable[[Config], bool], start: float
) -> Decision:
    reason = ""
    if model is not None and len(configs) > 1:
        scores = model.scores(problem, configs)
        for index in _best_first(scores):
            if not index or model.hyper.coefficient * float(scores[0] - scores[index]) < model.margin:
                reason = f"no configuration is expected to be more than {model.margin:.1%} faster than the default"
                break
            if usable(configs[index]):
                return Decision(problem, configs[index], "model", seconds=time.perf_counter() - start)
    return Decision(problem, configs[0], "default", seconds=time.perf_counter() - start, reason=reason)


def _best_first(scores: Numbers) -> Iterator[int]:
    """The best score; only if that one is refused are the others sorted, which takes a tenth of a choice."""
    best = int(np.argmin(scores))
    yield best
    yield from (int(index) for index in np.argsort(scores, kind="stable") if index != best)


def _process(
    problem: Problem, configs: Sequence[Config], model: Scores | None, memory: Memory | None
) -> GaussianProcess:
    """What is expected before measuring. Of a model that was taught on thousands of shapes, the errors on one tell
    nothing about another (`near` is 0 there); without one, earlier problems are all there is."""
    space, hyper = space_of(configs), WITHOUT_MODEL if model is None else model.hyper
    earlier = None if memory is None or not hyper.near else memory.earlier(problem, space.names)
    if model is not None:
        scores = model.scores(problem, configs)
    else:
        scores = np.full(len(configs), _DEFAULT_LEAD if earlier is None else 0.0)
        scores[:1] = 0.0
    return GaussianProcess(scores, space.scaled(hyper.ard), hyper, earlier, sizes_of(problem))


class _Measuring:
    """One problem being measured."""

    def __init__(
        self,
        problem: Problem,
        configs: Sequence[Config],
        process: GaussianProcess,
        measure: Trial,
        report: Callable[[Step, Config], None],
    ) -> None:
        self.problem, self.configs, self.process, self.measure, self.report = problem, configs, process, measure, report
        self.default_ns: float | None = None
        self.notes: list[str] = []
        self.left_out: list[str] = []  # why, once for each that could not be measured

    def run(self, budget: int, worth: float, usable: Callable[[Config], bool], start: float) -> Decision:
        claim = Claim(self.process)
        within5 = claim.after(0)
        timed = 0

        def reported(step: Step) -> None:
            nonlocal within5, timed
            timed += step.runtime_ns is not None
            within5 = claim.after(timed)
            self.report(step, self.configs[step.index])

        steps, reason = search(self.process, self._take, budget, worth, reported)
        best, runtime_ns = self._best(usable)
        source = "measured" if self.process.measured else "default"
        return Decision(
            self.problem, self.configs[best], source, runtime_ns, self.default_ns, len(steps), self.process.exhausted,
            self.process.exhausted or within5, time.perf_counter() - start, reason, steps,
            [*self._omissions(), *self.notes],
        )  # fmt: skip

    def _omissions(self) -> list[str]:
        """A line for each reason why configurations could not be measured."""
        counted = Counter(self.left_out).items()
        return [f"{n} {'configurations are' if n > 1 else 'configuration is'} left out: {why}" for why, n in counted]

    def _take(self, index: int) -> float | None:
        timed = self.measure.measure(self.configs[index])
        if timed.default_ns is not None:
            self.default_ns = timed.default_ns
            if index and 0 not in self.process.measured:  # it was timed beside; what it took is known for nothing
                self.process.observe(0, math.log(timed.default_ns))
        if timed.runtime_ns is None:
            self.left_out.append(timed.reason)
        return timed.runtime_ns

    def _best(self, usable: Callable[[Config], bool]) -> tuple[int, float | None]:
        """The fastest usable one and what it takes; the default where it is as fast, or where nothing was measured."""
        taken = {index: math.exp(logs) for index, logs in self.process.measured.items()} | self._remeasured()
        if not taken:
            return 0, self.default_ns
        default_ns = taken.get(0, self.default_ns)
        for index in sorted(taken, key=lambda index: (taken[index], index)):
            if default_ns is not None and taken[index] > default_ns * (1 - _WORTH):
                return 0, default_ns  # within noise; the default's path through the code is the shortest
            if not index or usable(self.configs[index]):
                return index, taken[index]
            self.notes.append("the fastest loses at another thread count, where it would be used as well")
        return 0, default_ns

    def _remeasured(self) -> dict[int, float]:
        """Those within noise of the fastest, timed again: of several noisy readings the shortest is a lucky one."""
        measured, best = self.process.measured, self.process.best
        if best is None:
            return {}
        near = [index for index, logs in measured.items() if logs - measured[best] < _CLOSE]
        near = sorted(near, key=measured.__getitem__)[:_MOST_CLOSE]
        if len(near) < 2:
            return {}
        again = self.measure.remeasure([self.configs[index] for index in near])
        return {i: ns for i, ns in zip(near, again, strict=True) if ns is not None and 0 < ns < math.inf}
