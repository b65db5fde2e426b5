"""Reliability checks for a series of timings. Each check returns a sentence about the problem and its remedy, or "".

The checks examine the samples (drift, two modes, outliers, dispersion) and the machine (CPU time of other processes,
time stolen by a hypervisor, a reference loop that ran slower at the end than at the start).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewise.profile.timing.statistics import Floats, median, rank_correlation

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class MachineReading:
    """State of the machine at one moment: CPU seconds used so far, and a reference loop's time."""

    at: float
    own_cpu: float
    busy_cpu: float | None
    stolen_cpu: float | None
    reference_loop: float


def read_machine() -> MachineReading:
    """Read the state of the machine, in about two milliseconds."""
    busy, stolen = _system_cpu_seconds()
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return MachineReading(time.perf_counter(), own, busy, stolen, _reference_loop())


def _system_cpu_seconds() -> tuple[float | None, float | None]:
    """Return CPU seconds since boot, (busy, stolen by the hypervisor); None without /proc."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None, None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND, steal / _TICKS_PER_SECOND


def _reference_loop() -> float:
    """Return the seconds of a fixed loop, the best of several: a measure of the clock frequency."""
    best = float("inf")
    for _ in range(25):
        start = time.perf_counter()
        for _ in range(4000):
            pass
        best = min(best, time.perf_counter() - start)
    return best


def machine_reasons(before: MachineReading, after: MachineReading) -> list[str]:
    """Return what may have disturbed a measurement between two readings: load, stolen time, frequency."""
    reasons = []
    seconds = max(after.at - before.at, 1e-9)
    cpus = os.cpu_count() or 1
    if seconds > 0.2 and after.busy_cpu is not None and before.busy_cpu is not None:
        others = (after.busy_cpu - before.busy_cpu) - (after.own_cpu - before.own_cpu)
        if others / seconds > 0.25 * cpus:
            reasons.append(f"load: other processes used {others / seconds:.1f} of {cpus} CPUs; close them and repeat")
        stolen = (after.stolen_cpu or 0.0) - (before.stolen_cpu or 0.0)
        if stolen / seconds > 0.02 * cpus:
            reasons.append(f"load: the hypervisor took away {stolen / seconds:.0%} of a CPU; repeat at a quieter time")
    relative_change = after.reference_loop / before.reference_loop - 1
    if abs(relative_change) > 0.15:
        direction = "slower" if relative_change > 0 else "faster"
        reasons.append(
            f"frequency: a fixed loop ran {abs(relative_change):.0%} {direction} at the end than at the start; "
            "the clock frequency or a neighbour on the same core changed"
        )
    return reasons


def sample_reasons(samples: Floats) -> list[str]:
    """Return reasons to distrust samples: drift, two modes, outliers, dispersion."""
    if len(samples) < 8 or median(samples) <= 0:
        return []
    checks = (_drift(samples), _two_modes(samples), _outliers(samples), _dispersion(samples))
    return [reason for reason in checks if reason]


def _drift(samples: Floats) -> str:
    """Return a sentence if times correlate with position and the last third differs by at least 3 %, else ""."""
    n = len(samples)
    correlation = rank_correlation(np.arange(n, dtype=np.float64), samples)
    third = max(n // 3, 1)
    relative_change = median(samples[-third:]) / median(samples[:third]) - 1
    if abs(correlation) < 3.0 / np.sqrt(n) or abs(relative_change) < 0.03:
        return ""
    word = "slower" if relative_change > 0 else "faster"
    amount = f"{abs(relative_change):.1%} {word}"
    return f"drift: the last third was {amount} than the first; raise warmup or look for growing state"


def _two_modes(samples: Floats) -> str:
    """Return a sentence if samples form two clusters, else "".

    They are split where the between-group variance is largest (Otsu 1979), and the gap is compared with the spread.
    """
    ordered = np.sort(samples)
    n = len(ordered)
    # Between-group variance of every split into the first k and the remaining samples.
    sizes = np.arange(1, n)
    sums = np.cumsum(ordered)[:-1]
    low_mean, high_mean = sums / sizes, (ordered.sum() - sums) / (n - sizes)
    cut = int(np.argmax(sizes * (n - sizes) * (high_mean - low_mean) ** 2)) + 1
    low, high = ordered[:cut], ordered[cut:]
    # A small second group means outliers, which have their own check.
    if min(len(low), len(high)) < max(0.15 * n, 3):
        return ""
    gap = median(high) - median(low)
    deviation = float(np.hypot(_robust_sd(low), _robust_sd(high)))
    if gap < 0.05 * median(ordered) or gap < 5.0 * deviation:
        return ""
    return (
        f"two modes: {len(low)} samples near {median(low):.3g} s and {len(high)} near {median(high):.3g} s; "
        "the function or its memory placement has two states"
    )


def _outliers(samples: Floats) -> str:
    """Return a sentence if more than 5 % of samples are beyond Tukey's outer fence, else "".

    The fence is the third quartile plus three interquartile ranges.
    """
    q1, middle, q3 = np.quantile(samples, [0.25, 0.5, 0.75])
    limit = max(q3 + 3 * (q3 - q1), 1.1 * middle)
    count = int(np.sum(samples > limit))
    if count <= max(0.05 * len(samples), 1):
        return ""
    return f"outliers: {count} of {len(samples)} samples are far above the rest (up to {samples.max() / middle:.1f}×)"


def _dispersion(samples: Floats) -> str:
    """Return a sentence if the interquartile range is at least 10 % of the median, else ""."""
    q1, middle, q3 = np.quantile(samples, [0.25, 0.5, 0.75])
    if (q3 - q1) / middle < 0.10:
        return ""
    return f"spread: the middle half of the samples spans {(q3 - q1) / middle:.0%} of the median"


def _robust_sd(values: Floats) -> float:
    """Return the standard deviation by the median absolute deviation (times 1.4826), robust to outliers."""
    return 1.4826 * median(np.abs(values - median(values)))
