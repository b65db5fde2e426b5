"""This CPU in numbers that a cost model reads: what stands in the `machine_` columns beside a configuration's own.

They say what the instruction set in force offers (lanes, registers), what the caches hold, how much of the shared one
falls to a core, and, where the ceilings were measured (`tilewise machine`, `tilewise collect cpu`), how fast it
multiplies and reads. All are whole numbers, in units that keep them below a billion. 0 is "not known".
"""

from __future__ import annotations

import functools
import mmap
from pathlib import Path
from typing import Any

from tilewise import _system
from tilewise._extension import native
from tilewise.profile.machine import Machine, cached_machine, machine

MACHINE_COLUMNS = (
    "machine_lanes", "machine_registers", "machine_cores", "machine_mflops", "machine_l1_kib", "machine_l2_kib",
    "machine_l3_kib", "machine_l3_share_kib", "machine_l1_mbs", "machine_l2_mbs", "machine_l3_mbs",
    "machine_memory_mbs", "machine_page_kib", "machine_large_pages",
)  # fmt: skip
_LANES = {"avx512": 16, "avx2": 8, "portable": 4}
_REGISTERS = {"avx512": 32}
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine_features(*, measure: bool = False) -> dict[str, int]:
    """This machine's columns, under the instruction set in force; ceilings that nobody measured yet are 0, unless they
    are to be measured now."""
    if native is None:
        return dict.fromkeys(MACHINE_COLUMNS, 0)
    ceilings = machine() if measure else _kept()
    return dict(zip(MACHINE_COLUMNS, (*_reported(native), *_measured(native, ceilings), *_pages()), strict=True))


@functools.cache
def _kept() -> Machine | None:
    """Read once a process: a choice must not wait for a file."""
    return cached_machine()


def _reported(module: Any) -> tuple[int, int, int]:
    isa = str(module.isa())
    lanes = next((lanes for name, lanes in _LANES.items() if isa.startswith(name)), 4)
    registers = next((count for name, count in _REGISTERS.items() if isa.startswith(name)), 16)
    return lanes, registers, _system.cores()


def _measured(module: Any, ceilings: Machine | None) -> tuple[int, ...]:
    """MFLOP/s of one thread, the caches in KiB, what a core has of the last, and MB/s that it reads from each."""
    l1, l2, l3 = (int(size) for size in module.cache_sizes())
    peak = round(ceilings.peak(1) / 1e6) if ceilings is not None else 0
    sizes = (l1 // 2, l2 // 2, min(l3 // 2, 16 << 20), 1 << 40)
    rates = [0 if ceilings is None else round(ceilings.read_bandwidth(size) / 1e6) for size in sizes]
    return peak, l1 >> 10, l2 >> 10, l3 >> 10, int(module.l3_share()) >> 10, *rates


def _pages() -> tuple[int, int]:
    """KiB of a page, and whether the system gives large ones: 0 not known, 1 never, 2 on request or always."""
    try:
        chosen = _LARGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return mmap.PAGESIZE >> 10, 0
    return mmap.PAGESIZE >> 10, 1 if "[never]" in chosen else 2
