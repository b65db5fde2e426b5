"""Decides whether an entry breaks a record: it must beat the record in one run of both, at p < 0.01.

Both are timed interleaved. Every block of that run gives one difference of log scores; memory and size do not vary and
enter as constants. A difference that could be chance leaves the old record in place.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tilewise.bench.build import build
from tilewise.bench.measure import Settings, is_better, log_score_differences, measure_together
from tilewise.bench.recipe import Recipe

_RUNS = 24  # twelve blocks; eight is the least with which a signed-rank test can reach p < 0.01


def duel(challenger: Recipe, record: Recipe, settings: Settings) -> dict[str, Any]:
    """Time both interleaved; return whether the challenger's score is higher at p < 0.01, that p, and the factor."""
    runs = max(settings.runs or challenger.event.runs, _RUNS)
    most = max(settings.most_runs or 4 * runs, runs)
    runners = {"record": build(record), "challenger": build(challenger)}
    together = measure_together(runners, replace(settings, runs=runs, most_runs=most))
    gains = together.speedup("challenger")
    constant = (math.log(gains.memory.ratio) + math.log(gains.size.ratio)) / 3
    differences = log_score_differences(together, "challenger", "record", constant)
    beaten, p_value = is_better(differences)
    return {"beaten": beaten, "p_value": p_value, "factor": float(math.exp(float(differences.mean())))}
