"""What earlier runs took of a kernel before they were stopped or killed, brought to what the machine does now.

Times count relative to the default of their own batch. A batch that was cut off has no second reading of its default;
one is taken now, and the batch counts if that agrees with the first.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from tilewise.store.aggregate import FIRST_FINAL_ROUND
from tilewise.store.store import BatchRow
from tilewise.tune.measure.sampling import Candidate, Clock, Report, Settings, warm_up

_READINGS = 5  # of the default, now


def earlier_default(batches: Sequence[BatchRow]) -> float | None:
    """What the default took in the undisturbed rounds of the last run that had any."""
    sound = [batch for batch in batches if not batch.disturbed and batch.round < FIRST_FINAL_ROUND]
    return statistics.median(b.default_ns for b in sound if b.run == sound[-1].run) if sound else None


def resume(
    clock: Clock, settings: Settings, candidates: Sequence[Candidate], batches: Sequence[BatchRow], report: Report
) -> None:
    """Give the candidates the times of `batches`; of each open one it is reported whether the default has moved."""
    if not batches:
        return
    default = candidates[0]
    warm_up(clock, default)
    unit = default.unit or default.runs[0]
    now_ns = statistics.median(clock.time_units([unit] * _READINGS)) / default.launches
    clock.watch()  # so that the first batch is not judged by what went on before it
    times: dict[str, list[float]] = defaultdict(list)
    final: dict[str, list[float]] = defaultdict(list)
    for batch in batches:
        disturbed = batch.disturbed
        if batch.open:
            disturbed = abs(now_ns / batch.default_ns - 1) > settings.disturbed
            report("judged", batch, disturbed)
        if not disturbed:
            kept = final if batch.round >= FIRST_FINAL_ROUND else times
            for key, runtime_ns in ((default.config.key, batch.default_ns), *batch.runtime_ns.items()):
                kept[key].append(runtime_ns / batch.default_ns * now_ns)
    for candidate in candidates:
        candidate.times, candidate.final = times[candidate.config.key], final[candidate.config.key]
