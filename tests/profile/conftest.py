"""Made-up ceilings and a clock of our own, so that no test depends on what this machine can do, or on its load."""

from __future__ import annotations

import time

import pytest

from tilewise import get_num_threads, set_num_threads
from tilewise._extension import native
from tilewise.backend import recording
from tilewise.profile import leaks, machine
from tilewise.profile.machine import Bandwidth, MachineFigures, Peak

ISAS = ["numpy"] if native is None else list(native.supported_isas())


@pytest.fixture(autouse=True)
def nothing_doubted():
    """No figures that another test measured on a busy machine, and none left for the next."""
    machine._measure_once.cache_clear()
    yield
    machine._measure_once.cache_clear()


@pytest.fixture
def ceilings():
    """100 GFLOP/s, 40 GB/s in cache, 20 GB/s in memory, 2 GB/s for fresh memory."""
    peaks = [Peak(isa, 1, 100e9) for isa in ISAS]
    return MachineFigures(
        "test", 1, "made up", peaks, [Bandwidth(1 << 14, 1, 50e9, 40e9), Bandwidth(1 << 28, 1, 20e9, 20e9)], [], 2e9
    )


class CpuClock:
    """Stands still while other programs have the processor; `skip` plants an interruption."""

    def __init__(self):
        self.skipped_ns = 0

    def __call__(self):
        return time.thread_time_ns() + self.skipped_ns

    def skip(self, seconds):
        self.skipped_ns += int(seconds * 1e9)


@pytest.fixture
def cpu_clock(monkeypatch):
    """Profile by the processor time of this thread, on one thread."""
    clock, threads = CpuClock(), get_num_threads()
    monkeypatch.setattr(recording, "now", clock)
    set_num_threads(1)
    yield clock
    set_num_threads(threads)


@pytest.fixture(params=["heap watch", "tracemalloc"])
def either_way(request, monkeypatch):
    """With the extension, and as if it were not there."""
    if request.param == "tracemalloc":
        monkeypatch.setattr(leaks, "native", None)
        monkeypatch.setattr("tilewise.profile.memory.native", None)
    elif native is None:
        pytest.skip("the heap watch is in the extension")
