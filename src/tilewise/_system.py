"""The system as tilewise sees it: cores and caches, real or pretended (``TILEWISE_MACHINE``), the CPU's name,
and the folder for what is kept between processes.

Whoever asks how many cores there are, or how large a cache is, asks here. What holds a clock asks for the real ones:
nothing is timed on more threads than there are cores.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tilewise._environment import pretended
from tilewise._extension import native


class CacheLevel(NamedTuple):
    """One level of data cache as one core sees it, and how many CPUs share it."""

    level: int
    bytes: int
    shared_by: int


def cache_folder() -> Path:
    """``$TILEWISE_CACHE``, else tilewise under ``$XDG_CACHE_HOME`` or ~/.cache: all that is kept between processes."""
    chosen = os.environ.get("TILEWISE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tilewise"


def real_cores() -> int:
    """Cores that this process may use."""
    if native is not None:
        return int(native.real_cores())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cores() -> int:
    """Cores that this process may use, or pretends to have."""
    return pretended().cores or real_cores()


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def pretence() -> str:
    """What is pretended, in the words of ``TILEWISE_MACHINE``; empty on a machine that is itself."""
    return ",".join(f"{name}={value}" for name, value in vars(pretended()).items() if value is not None)


def caches() -> list[CacheLevel]:
    """Data and unified caches, as the system lists them or as pretended; an empty list where nobody says."""
    levels = {level.level: level for level in _listed()}
    played = pretended()
    for number, size in enumerate((played.l1, played.l2, played.l3), start=1):
        if size == 0:
            levels.pop(number, None)
        elif size is not None:
            levels[number] = CacheLevel(number, size, cores() if number == 3 else 1)
    return [levels[number] for number in sorted(levels)]


def _listed() -> list[CacheLevel]:
    found = []
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{_first_cpu()}/cache").glob("index*")):
        with suppress(OSError, ValueError):
            if (index / "type").read_text().strip() == "Instruction":
                continue
            text = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
            size = int(text[:-1]) * unit if unit > 1 else int(text)
            shared = _count_cpus((index / "shared_cpu_list").read_text().strip())
            found.append(CacheLevel(int((index / "level").read_text()), size, shared))
    return found


def _first_cpu() -> int:
    return min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def _count_cpus(text: str) -> int:
    """How many CPUs a list like 0-3,8 names."""
    ranges = [part.split("-") for part in text.split(",")]
    return sum(int(r[-1]) - int(r[0]) + 1 for r in ranges)
