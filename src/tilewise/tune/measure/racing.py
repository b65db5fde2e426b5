"""The finals: the fastest few configurations of a kernel are timed again, interleaved, until their order is settled.

The minimum of a hundred noisy readings is biased: it is mostly the luckiest one (the winner's curse). The finalists are
therefore timed anew, all of them in every batch, which removes drift from their differences. Their final runtimes come
from these timings alone, because the readings that selected them were lucky. A finalist that falls behind is replaced
by the next one. If readings are so noisy that the fastest may not be among the finalists, more configurations take part
in the first rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewise.store.aggregate import MIN_FINAL_TIMINGS, faster_two_of_three

if TYPE_CHECKING:
    from tilewise.tune.measure.sampling import Candidate, TimingSettings

_MIN_STANDARD_ERRORS = 3.0  # distance at which two configurations count as different


def relative_runtime(candidate: Candidate, default: Candidate) -> float:
    """Runtime relative to the default in the same rounds; from the finals if there are enough timings."""
    if len(candidate.final) >= MIN_FINAL_TIMINGS:
        return faster_two_of_three(candidate.final) / faster_two_of_three(default.final)
    return faster_two_of_three(candidate.times) / faster_two_of_three(default.times)


def leaders(candidates: Sequence[Candidate], default: Candidate, count: int) -> list[Candidate]:
    """The `count` fastest candidates so far, fastest first."""
    candidates_with_times = [c for c in candidates if (c.times and default.times) or len(c.final) >= MIN_FINAL_TIMINGS]
    return sorted(candidates_with_times, key=lambda candidate: relative_runtime(candidate, default))[:count]


def is_settled(finalists: Sequence[Candidate], settings: TimingSettings) -> bool:
    """True if the first finalist is clearly faster than each other one, or the difference is known precisely."""
    if any(len(candidate.final) < settings.final_rounds for candidate in finalists):
        return False
    return all(_is_separated(finalists[0].final, rival.final, settings.final_error) for rival in finalists[1:])


def _is_separated(best: Sequence[float], rival: Sequence[float], error: float) -> bool:
    """Compare the last rounds that both took part in: timings of one batch share its drift."""
    common = min(len(best), len(rival))
    log_ratios = [math.log(b / a) for a, b in zip(best[-common:], rival[-common:], strict=True)]
    deviation = statistics.stdev(log_ratios) / math.sqrt(common) if common > 1 else math.inf
    return deviation <= error or statistics.fmean(log_ratios) >= _MIN_STANDARD_ERRORS * deviation
