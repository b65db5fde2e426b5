"""Made-up ceilings, so that no test depends on what this machine can do or on its cache file."""

from __future__ import annotations

import pytest

from tilewise._extension import native
from tilewise.profile.machine import Bandwidth, Machine, Peak

ISAS = ["numpy"] if native is None else list(native.supported_isas())


@pytest.fixture
def ceilings():
    """100 GFLOP/s, 40 GB/s in cache, 20 GB/s in memory, 2 GB/s for fresh memory."""
    peaks = [Peak(isa, 1, 100e9) for isa in ISAS]
    return Machine(
        "test", 1, "made up", peaks, [Bandwidth(1 << 14, 1, 50e9, 40e9), Bandwidth(1 << 28, 1, 20e9, 20e9)], [], 2e9
    )
