"""When is a record broken? When the new entry beats the old one in a run of both, at p < 0.01.

Both are timed in turns with the baseline. Every block of that run gives one difference of log scores; memory and size
do not vary and enter as constants. A difference that chance could have made leaves the old record standing.
"""

from __future__ import annotations

import math
from typing import Any

from tilewise.bench.build import build
from tilewise.bench.measure import Settings, is_better, log_score_differences, measure_together
from tilewise.bench.recipe import Recipe
from tilewise.bench.runner import baseline


def duel(challenger: Recipe, record: Recipe, settings: Settings) -> dict[str, Any]:
    """Measure both in turns: whether the challenger's score is higher at p < 0.01, that p, and by what factor."""
    runners = {"baseline": baseline(challenger.event), "record": build(record), "challenger": build(challenger)}
    together = measure_together(runners, settings)
    new, old = together.speedup("challenger"), together.speedup("record")
    constant = (math.log(new.memory.ratio / old.memory.ratio) + math.log(new.size.ratio / old.size.ratio)) / 3
    differences = log_score_differences(together, "challenger", "record", constant)
    beaten, p_value = is_better(differences)
    return {"beaten": beaten, "p_value": p_value, "factor": float(math.exp(float(differences.mean())))}
