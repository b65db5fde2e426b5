"""The search itself: ask the process what to measure, measure it, stop when the budget is spent or the rest cannot pay.

It does not know what it measures: replay hands it recorded runtimes, the tuners real ones. Given the same readings it
takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewise.tune.search.gaussian_process import GaussianProcess

Measure = Callable[[int], float | None]
BUDGET = 5  # measurements of a problem, unless told otherwise


@dataclass(frozen=True)
class Step:
    """One measurement; `runtime_ns` is None where the configuration failed."""

    index: int
    runtime_ns: float | None


def search(
    process: GaussianProcess,
    measure: Measure,
    budget: int = BUDGET,
    worth: float = 0.0,
    report: Callable[[Step], None] = lambda step: None,
) -> tuple[list[Step], str]:
    """Measure at most `budget` configurations; fewer where knowing all the rest would save less than `worth`. Gives
    what was measured, in order, and why it ended; the process knows the fastest."""
    steps: list[Step] = []
    reason = f"the budget of {budget} is spent"
    while len(steps) < budget:
        index = process.next()
        if index is None:
            reason = "every promising configuration is measured"
            break
        runtime_ns = measure(index)
        if runtime_ns is not None and 0 < runtime_ns < math.inf:
            process.observe(index, math.log(runtime_ns))
        else:
            runtime_ns = None
            process.refuse(index)
        steps.append(Step(index, runtime_ns))
        report(steps[-1])
        if worth and process.best is not None and process.value_of_information() < worth:
            reason = "the rest cannot pay"
            break
    if process.best is None:
        reason = "no configuration could be measured"
    return steps, reason
