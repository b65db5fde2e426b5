"""The finals: the best few of a kernel are timed again, side by side, until the order at the top stands.

The fastest of a hundred noisy readings is not yet the fastest: it is mostly the luckiest. So the best few are timed
anew, all of them in every batch, which takes drifts out of their differences; and what is said of them later comes from
the finals alone, since the readings that brought them there are the lucky ones. One that falls behind is replaced by
the next in line; and where the readings are so noisy that the best may not be among the few, more take part in the
first rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.store.aggregate import MIN_FINAL_TIMINGS, faster_two_of_three

if TYPE_CHECKING:
    from tilewise.tune.measure.sampling import Candidate, Settings

_CLEAR = 3.0  # standard errors between two that are told apart


def standing(candidate: Candidate, default: Candidate) -> float:
    """What it takes, relative to the default in the same rounds."""
    if len(candidate.final) >= MIN_FINAL_TIMINGS:
        return faster_two_of_three(candidate.final) / faster_two_of_three(default.final)
    return faster_two_of_three(candidate.times) / faster_two_of_three(default.times)


def best_few(candidates: Sequence[Candidate], default: Candidate, count: int) -> list[Candidate]:
    """The best `count` by what is known so far, best first."""
    timed = [c for c in candidates if (c.times and default.times) or len(c.final) >= MIN_FINAL_TIMINGS]
    return sorted(timed, key=lambda candidate: standing(candidate, default))[:count]


def stands(few: Sequence[Candidate], settings: Settings) -> bool:
    """Whether the first of `few` is told apart from each other one, or differs so little that it does not matter."""
    if any(len(candidate.final) < settings.final_rounds for candidate in few):
        return False
    return all(_settled(few[0].final, rival.final, settings.final_error) for rival in few[1:])


def _settled(best: Sequence[float], rival: Sequence[float], error: float) -> bool:
    """Of the last rounds that both were in: those of one batch share its drift."""
    common = min(len(best), len(rival))
    apart = [math.log(b / a) for a, b in zip(best[-common:], rival[-common:], strict=True)]
    deviation = statistics.stdev(apart) / math.sqrt(common) if common > 1 else math.inf
    return deviation <= error or statistics.fmean(apart) >= _CLEAR * deviation
