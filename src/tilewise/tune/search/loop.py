"""The search loop: ask the process what to measure, measure it, and stop when the budget is spent or further
measurements cannot pay.

The loop is independent of the source of runtimes: replay passes recorded ones, the tuners measure. The same readings
always lead to the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewise.tune.search.gaussian_process import GaussianProcess

Measure = Callable[[int], float | None]
BUDGET = 5  # default number of measurements per problem


@dataclass(frozen=True)
class SearchStep:
    """One measurement; `runtime_ns` is None if the configuration failed."""

    index: int
    runtime_ns: float | None


def search(
    process: GaussianProcess,
    measure: Measure,
    budget: int = BUDGET,
    worth: float = 0.0,
    report: Callable[[SearchStep], None] = lambda step: None,
) -> tuple[list[SearchStep], str]:
    """Measure at most `budget` configurations, fewer if knowing all others would save less than `worth`.

    Returns the measurements in order and the reason for stopping. The process has the fastest one (`process.best`).
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
