"""The search itself: ask the belief what to measure, measure it, and stop when the rest cannot pay.

It does not know what it measures: replay hands it recorded runtimes, the CPU and the Triton tuner real ones. Given the
same measurements it takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.tune.search.gaussian_process import Belief, Doubt

Measure = Callable[[int], float | None]
Again = Callable[[Sequence[int]], Sequence[float | None]]  # nanoseconds of several that were measured before
_SETTLED = 3  # contenders that are timed again, each for itself
MOST = 10  # measurements of a shape, unless told otherwise


@dataclass(frozen=True)
class Rule:
    """When to stop: the expected saving of going on is below `gain`; and when to call the result sure.

    `sure` is the largest believed chance of a miss (more than one per cent) at which, on validation kernels, the claim
    held often enough. 0 never claims.
    """

    gain: float = 0.01
    sure: float = 0.0
    budget: int = MOST
    least: int = 1  # measurements before stopping is thought of

    @property
    def asks(self) -> bool:
        """Whether the doubt after each measurement matters."""
        return self.gain > 0 or self.sure > 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rule:
        gain, sure, budget = float(values["gain"]), float(values["sure"]), int(values.get("budget", MOST))
        least = int(values.get("least", 1))
        if not (0 <= gain <= 10 and 0 <= sure <= 1 and budget >= 1 and least >= 1):
            raise ValueError("a rule needs a gain and a chance that are not negative, and a budget")
        return cls(gain, sure, budget, least)


@dataclass(frozen=True)
class Step:
    """One measurement and what was believed after it. `runtime_ns` is None where the configuration failed."""

    index: int
    runtime_ns: float | None
    gain: float
    chance: float


@dataclass(frozen=True)
class Found:
    """The best configuration and how it was found. `sure` claims it is within one per cent of the best there is."""

    best: int | None
    runtime_ns: float | None
    sure: bool
    reason: str
    steps: list[Step] = field(default_factory=list)

    @property
    def measurements(self) -> int:
        return len(self.steps)


def settle(belief: Belief, again: Again, close: float, final: bool = False) -> int | None:
    """Time the closest few once more, within `close` of the best, and name the best.

    They are compiled already, and what decides between them is otherwise the noise of one reading. Where the readings
    of `again` are `final`, much better than those before, they alone decide; else both count, and what was believed.
    """
    best = belief.best
    if best is None:
        return None
    near = [index for index, logs in belief.measured.items() if logs - belief.measured[best] < close]
    near = sorted(near, key=belief.measured.__getitem__)[: None if final else _SETTLED]
    settled: dict[int, float] = {}
    for index, runtime_ns in zip(near, again(near) if len(near) > 1 else (), strict=False):
        if runtime_ns is not None and 0 < runtime_ns < math.inf:
            settled[index] = math.log(runtime_ns)
    for index, logs in settled.items():
        before = belief.measured[index]
        belief.learn(index, logs)
        belief.measured[index] = logs if final else 0.5 * (before + logs)
    return min(settled, key=lambda index: (settled[index], index)) if final and settled else belief.likeliest()


def search(
    belief: Belief, measure: Measure, rule: Rule, report: Callable[[Step], None] = lambda step: None, patience: int = 1
) -> Found:
    """Measure until the rule says stop. `patience` is how many measurements there are at least."""
    steps: list[Step] = []
    reason = "every promising configuration is measured"
    while True:
        index = belief.next()
        if index is None:
            break
        runtime_ns = measure(index)
        if runtime_ns is None or not 0 < runtime_ns < math.inf:
            runtime_ns = None
            belief.refuse(index)
        else:
            belief.learn(index, math.log(runtime_ns))
        doubt = belief.doubt() if rule.asks else Doubt(1.0, 1.0)
        steps.append(Step(index, runtime_ns, doubt.gain, doubt.chance))
        report(steps[-1])
        if belief.best is not None and doubt.gain < rule.gain and len(steps) >= max(patience, rule.least):
            reason = "the rest cannot pay"
            break
        if len(steps) >= rule.budget:
            reason = f"the budget of {rule.budget} is spent"
            break
    best = belief.best
    if best is None:
        return Found(None, None, False, "no configuration could be measured", steps)
    # A rule of 0 was fitted to too little to vouch for anything: then only what was measured whole is sure.
    sure = index is None or 0 < rule.sure >= steps[-1].chance
    return Found(best, math.exp(belief.measured[best]), sure, reason, steps)
