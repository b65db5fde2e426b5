"""First stop: peak arithmetic and bandwidth of this machine, which bound every later result."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tilewise._extension import native
from tilewise.tour.stops import Bars, Stop, Table, Visit

BUSY_CORES = 0.3  # cores that other programs use, above which times are called unsteady; arbitrary


def _cores_used_by_others(seconds: float = 0.3) -> float:
    """Return how many cores other processes use while this one sleeps; 0 if /proc/stat is missing."""
    before = _busy_ticks()
    time.sleep(seconds)
    return max(0, _busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    """Return the CPU time used by all processes since boot, in clock ticks."""
    try:
        user, nice, system = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
    except (OSError, ValueError):
        return 0
    return int(user) + int(nice) + int(system)


def machine_stop(visit: Visit) -> Stop:
    """Measure the ceilings of this machine and warn if other programs are using it."""
    from tilewise.profile.machine import active_isa, machine

    visit.say("measuring arithmetic and memory (stored for the next time)")
    ceilings = machine()
    threads = max(peak.threads for peak in ceilings.peaks)
    one_thread, all_threads = ceilings.peak(1), ceilings.peak(threads)
    bandwidth = ceilings.memory_bandwidth()
    peaks = {
        f"{peak.isa}, {peak.threads} thread{'s'[: peak.threads > 1]}": peak.flops_per_second / 1e9
        for peak in ceilings.peaks
    }
    facts = {
        "isa": active_isa(),
        "gflops": one_thread / 1e9,
        "gflops_all": all_threads / 1e9,
        "copy_gb_per_s": bandwidth / 1e9,
    }
    if native is None:
        lines = [
            "The compiled kernels are not installed, so everything below runs on NumPy. Its library multiplies at "
            f"{all_threads / 1e9:.0f} GFLOP/s with {threads} thread{'s'[: threads > 1]}; memory gives "
            f"{bandwidth / 1e9:.0f} GB/s."
        ]
    else:
        lines = [
            f"One thread does {one_thread / 1e9:.0f} GFLOP/s with {active_isa()} instructions"
            + (f", {threads} threads do {all_threads / 1e9:.0f}" if threads > 1 else "")
            + f"; memory gives {bandwidth / 1e9:.0f} GB/s."
        ]
    busy = _cores_used_by_others()
    facts["load"] = busy
    if busy > BUSY_CORES:
        lines.append(
            f"Other programs keep {busy:.1f} of its cores busy: the times below are unsteady, and libraries that share "
            "the cores suffer most. Close them and take the tour again."
        )
    table = Table(("instructions and threads", "GFLOP/s"), [(name, f"{rate:,.1f}") for name, rate in peaks.items()])
    meaning = (
        "The ceilings: no program can run faster than this machine computes and reads memory. Arithmetic is counted in "
        "GFLOP/s, billions of multiplications and additions a second. Wider instructions and more threads raise it."
    )
    return Stop("This machine", facts, lines, [table], [Bars("Arithmetic", "GFLOP/s", peaks)], meaning)
