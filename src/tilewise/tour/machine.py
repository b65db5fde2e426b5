"""First stop: what this machine can do at best, since every speed after it is limited by that."""

from __future__ import annotations

from tilewise._extension import native
from tilewise.tour.stops import Bars, Stop, Table, Visit


def machine_stop(visit: Visit) -> Stop:
    from tilewise.profile.machine import active_isa, machine

    visit.say("measuring arithmetic and memory (kept for the next time)")
    ceilings = machine()
    threads = max(peak.threads for peak in ceilings.peaks)
    one, every = ceilings.peak(1), ceilings.peak(threads)
    bandwidth = ceilings.memory_bandwidth()
    peaks = {
        f"{peak.isa}, {peak.threads} thread{'s'[: peak.threads > 1]}": peak.flops_per_second / 1e9
        for peak in ceilings.peaks
    }
    facts = {"isa": active_isa(), "gflops": one / 1e9, "gflops_all": every / 1e9, "read_gb_per_s": bandwidth / 1e9}
    lines = [
        f"One thread does {one / 1e9:.0f} GFLOP/s with {active_isa()} instructions, {threads} do {every / 1e9:.0f}; "
        f"memory gives {bandwidth / 1e9:.0f} GB/s.",
    ]
    if native is None:
        lines.append("The compiled kernels are not installed, so everything below runs on NumPy.")
    table = Table(("instructions and threads", "GFLOP/s"), [(name, f"{rate:,.1f}") for name, rate in peaks.items()])
    return Stop("This machine", facts, lines, [table], [Bars("Arithmetic", "GFLOP/s", peaks)])
