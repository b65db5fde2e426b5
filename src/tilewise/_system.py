"""Properties of the system: cores and caches (real, or emulated by ``TILEWISE_MACHINE``), CPU name, cache folder.

All code that needs the number of cores or a cache size gets it here. Code that measures time uses `real_cores`, so
that nothing is timed on more threads than there are cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise._extension import native

if TYPE_CHECKING:
    from tilewise._environment import MachineOverride


@dataclass(frozen=True)
class CacheLevel:
    """Size of one level of data cache, and the number of CPUs that share it."""

    level: int
    bytes: int
    shared_by: int


def cache_folder() -> Path:
    """Folder of all cached data: ``$TILEWISE_CACHE``, else tilewise under ``$XDG_CACHE_HOME`` or ~/.cache."""
    folder = os.environ.get("TILEWISE_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tilewise"


def real_cores() -> int:
    """Number of cores that this process may use."""
    if native is not None:
        return int(native.real_cores())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cores() -> int:
    """Number of cores that this process may use, or the emulated number."""
    override = _machine_override()
    return (override.cores if override else None) or real_cores()


def cpu_name() -> str:
    """Name of the processor, as reported by the system."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def machine_override_text() -> str:
    """The emulated values in the syntax of ``TILEWISE_MACHINE``; empty if nothing is emulated."""
    override = _machine_override()
    values = vars(override) if override else {}
    return ",".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _machine_override() -> MachineOverride | None:
    """Parse ``TILEWISE_MACHINE``; None if it is not set."""
    if "TILEWISE_MACHINE" not in os.environ:
        return None
    from tilewise._environment import machine_override

    return machine_override()


def caches() -> list[CacheLevel]:
    """Data and unified caches, real or emulated; empty if the system does not report any."""
    levels = {level.level: level for level in _system_caches()}
    override = _machine_override()
    for number, size in enumerate((override.l1, override.l2, override.l3) if override else (), start=1):
        if size == 0:
            levels.pop(number, None)
        elif size is not None:
            levels[number] = CacheLevel(number, size, cores() if number == 3 else 1)
    return [levels[number] for number in sorted(levels)]


def _system_caches() -> list[CacheLevel]:
    """Read the caches of the first usable CPU from Linux's sysfs."""
    levels = []
    first_cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{first_cpu}/cache").glob("index*")):
        with suppress(OSError, ValueError):
            if (index / "type").read_text().strip() == "Instruction":
                continue
            text = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
            size = int(text[:-1]) * unit if unit > 1 else int(text)
            shared = _count_cpus((index / "shared_cpu_list").read_text().strip())
            levels.append(CacheLevel(int((index / "level").read_text()), size, shared))
    return levels


def _count_cpus(text: str) -> int:
    """Count the CPUs in a list like 0-3,8."""
    ranges = [part.split("-") for part in text.split(",")]
    return sum(int(r[-1]) - int(r[0]) + 1 for r in ranges)


# --- processes that end together ---


_PR_SET_PDEATHSIG = 1
_PARENT = "TILEWISE_PARENT"


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the one that started it ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):  # the parent ended before prctl was called
        sys.exit(0)


def child_environment() -> dict[str, str]:
    """Return the environment variables that a child needs in order to call `die_with_parent`."""
    return {_PARENT: str(os.getpid())}
