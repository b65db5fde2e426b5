"""A clock for the CPU collector that says every unit took as long as every other, however busy the machine is."""

from __future__ import annotations

from typing import Any

from tilewise.tune.measure.cpu.clock import CpuClock


class SteadyClock(CpuClock):
    """Runs the units; a test's outcome must not depend on what they took."""

    def time_units(self, units: Any) -> list[float]:
        for unit in units:
            unit()
        return [1e6 for _ in units]

    def watch(self) -> dict[str, float]:
        return {}
