"""Properties of this CPU as model inputs: the values of a configuration's `machine_` columns.

They describe the active instruction set (vector lanes, registers), the cache sizes, one core's share of the shared
cache and, if the machine was benchmarked (`tilewise machine`, `tilewise collect cpu`), peak FLOP/s and bandwidths.
All are integers in units that keep them below a billion. 0 means "unknown".
"""

from __future__ import annotations

import functools
import mmap
from pathlib import Path
from typing import Any

from tilewise import _system
from tilewise._extension import native
from tilewise.profile.machine import MachineFigures, cached_machine, machine

MACHINE_COLUMNS = (
    "machine_lanes", "machine_registers", "machine_cores", "machine_mflops", "machine_l1_kib", "machine_l2_kib",
    "machine_l3_kib", "machine_l3_share_kib", "machine_l1_mbs", "machine_l2_mbs", "machine_l3_mbs",
    "machine_memory_mbs", "machine_page_kib", "machine_large_pages",
)  # fmt: skip
# float32 lanes and vector registers by instruction set.
_LANES = {"avx512": 16, "avx2": 8, "portable": 4}
_REGISTERS = {"avx512": 32}
_DEFAULT_LANES, _DEFAULT_REGISTERS = 4, 16
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine_features(*, measure: bool = False) -> dict[str, int]:
    """Return the machine columns for the active instruction set.

    Ceilings that were never measured are 0, unless `measure` asks to measure them now.
    """
    if native is None:
        return dict.fromkeys(MACHINE_COLUMNS, 0)
    ceilings = machine() if measure else _stored_ceilings()
    values = (*_core_features(native), *_cache_features(native, ceilings), *_page_features())
    return dict(zip(MACHINE_COLUMNS, values, strict=True))


@functools.cache
def _stored_ceilings() -> MachineFigures | None:
    """Read the stored measurements once per process, so that choosing a tile never waits for a file."""
    return cached_machine()


def _core_features(module: Any) -> tuple[int, int, int]:
    """Return vector lanes, vector registers and the number of cores."""
    isa = str(module.isa())
    lanes = next((lanes for name, lanes in _LANES.items() if isa.startswith(name)), _DEFAULT_LANES)
    registers = next((count for name, count in _REGISTERS.items() if isa.startswith(name)), _DEFAULT_REGISTERS)
    return lanes, registers, _system.cores()


def _cache_features(module: Any, ceilings: MachineFigures | None) -> tuple[int, ...]:
    """Return one thread's MFLOP/s, cache sizes and L3 share in KiB, and read bandwidth from each level in MB/s."""
    l1, l2, l3 = (int(size) for size in module.cache_sizes())
    peak = round(ceilings.peak(1) / 1e6) if ceilings is not None else 0
    # Half of a cache fits it for certain; 1 TiB stands for main memory.
    working_sets = (l1 // 2, l2 // 2, min(l3 // 2, 16 << 20), 1 << 40)
    rates = [0 if ceilings is None else round(ceilings.read_bandwidth(size) / 1e6) for size in working_sets]
    return peak, l1 >> 10, l2 >> 10, l3 >> 10, int(module.l3_share()) >> 10, *rates


def _page_features() -> tuple[int, int]:
    """Return the page size in KiB and the transparent-huge-page mode: 0 unknown, 1 never, 2 on request or always."""
    try:
        mode = _LARGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return mmap.PAGESIZE >> 10, 0
    return mmap.PAGESIZE >> 10, 1 if "[never]" in mode else 2
