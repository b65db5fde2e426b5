"""Resume a kernel whose measurement was stopped: use its earlier timings, scaled to the machine's current speed.

Timings count relative to the default of their own batch. A batch that was cut off has no second reading of its default;
the default is timed now, and the batch counts if this agrees with the first reading.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from tilewise.store.aggregate import FIRST_FINAL_ROUND
from tilewise.store.store import BatchRow
from tilewise.tune.measure.sampling import Candidate, Clock, Report, TimingSettings, warm_up

_DEFAULT_READINGS = 5  # of the default at the start; their median counts


def earlier_default(batches: Sequence[BatchRow]) -> float | None:
    """Median time of the default in the undisturbed rounds of the last run that has any."""
    undisturbed = [batch for batch in batches if not batch.disturbed and batch.round < FIRST_FINAL_ROUND]
    return statistics.median(b.default_ns for b in undisturbed if b.run == undisturbed[-1].run) if undisturbed else None


def resume(
    clock: Clock, settings: TimingSettings, candidates: Sequence[Candidate], batches: Sequence[BatchRow], report: Report
) -> None:
    """Give the candidates the timings of `batches`; report for each open batch whether it is disturbed."""
    if not batches:
        return
    default = candidates[0]
    warm_up(clock, default)
    unit = default.unit or default.runs[0]
    now_ns = statistics.median(clock.time_units([unit] * _DEFAULT_READINGS)) / default.launches
    clock.watch()  # reset: the first batch must not be blamed for what happened before it
    times: dict[str, list[float]] = defaultdict(list)
    final: dict[str, list[float]] = defaultdict(list)
    for batch in batches:
        disturbed = batch.disturbed
        if batch.open:
            disturbed = abs(now_ns / batch.default_ns - 1) > settings.disturbed
            report("judged", batch, disturbed)
        if not disturbed:
            destination = final if batch.round >= FIRST_FINAL_ROUND else times
            for key, runtime_ns in ((default.config.key, batch.default_ns), *batch.runtime_ns.items()):
                destination[key].append(runtime_ns / batch.default_ns * now_ns)
    for candidate in candidates:
        candidate.times, candidate.final = times[candidate.config.key], final[candidate.config.key]
