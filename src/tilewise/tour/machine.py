"""First stop: peak arithmetic and bandwidth of this machine, which bound every later result."""

from __future__ import annotations

import time
from typing import Any

from tilewise._extension import native
from tilewise.profile.timing.stability import machine_reasons, read_machine
from tilewise.tour.stops import Bars, Stop, Table, Visit

_OBSERVED_SECONDS = 0.3  # of other programs' load; arbitrary, longer than the 0.2 s that `machine_reasons` needs


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
    facts: dict[str, Any] = {
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
    before = read_machine()
    time.sleep(_OBSERVED_SECONDS)
    disturbances = machine_reasons(before, read_machine())
    facts["unsteady"] = disturbances
    lines += [f"The times below are unsteady, those of other libraries most: {reason}." for reason in disturbances]
    table = Table(("instructions and threads", "GFLOP/s"), [(name, f"{rate:,.1f}") for name, rate in peaks.items()])
    meaning = (
        "The ceilings: no program can run faster than this machine computes and reads memory. Arithmetic is counted in "
        "GFLOP/s, billions of multiplications and additions a second. Wider instructions and more threads raise it."
    )
    return Stop("This machine", facts, lines, [table], [Bars("Arithmetic", "GFLOP/s", peaks)], meaning)
