"""Measure time, memory and FLOPs, and compare a model's speed with what the machine can do.

The three most important names: `Timer` (times functions, with confidence intervals), `ProfilerContext` (records every
operation inside a `with` block) and `MemoryProfiler` (peak memory and leaks). Names are imported on first use: the cost
model needs this package's statistics and nothing else of it.
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.profile.compare import Comparison, Ratio
    from tilewise.profile.context import ProfilerContext
    from tilewise.profile.flops import Cost, FLOPCounter, OpCounts
    from tilewise.profile.leaks import AllocationSite, LeakReport
    from tilewise.profile.machine import MachineFigures
    from tilewise.profile.memory import MemoryProfile, MemoryProfiler
    from tilewise.profile.report.bottleneck import Finding
    from tilewise.profile.report.results import ProfileResults
    from tilewise.profile.timer import Measurement, Timer
    from tilewise.profile.timing.limits import MeasurementError, TimeLimitError
    from tilewise.profile.timing.statistics import Interval

__all__ = [
    "AllocationSite",
    "Comparison",
    "Cost",
    "FLOPCounter",
    "Finding",
    "Interval",
    "LeakReport",
    "MachineFigures",
    "Measurement",
    "MeasurementError",
    "MemoryProfile",
    "MemoryProfiler",
    "OpCounts",
    "ProfileResults",
    "ProfilerContext",
    "Ratio",
    "TimeLimitError",
    "Timer",
]

__getattr__ = late_names(
    __name__,
    {
        ".compare": "Comparison Ratio",
        ".context": "ProfilerContext",
        ".flops": "Cost FLOPCounter OpCounts",
        ".leaks": "AllocationSite LeakReport",
        ".machine": "MachineFigures",
        ".memory": "MemoryProfile MemoryProfiler",
        ".report.bottleneck": "Finding",
        ".report.results": "ProfileResults",
        ".timer": "Measurement Timer",
        ".timing.limits": "MeasurementError TimeLimitError",
        ".timing.statistics": "Interval",
    },
)
