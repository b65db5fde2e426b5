"""The compiled kernels, or None where they were not built.

Everything in tilewise works without them on NumPy paths; one warning says so. ``TILEWISE_NATIVE=0`` switches them off,
``TILEWISE_ISA=portable|avx2|avx512`` forces an instruction set, and ``TILEWISE_MACHINE`` plays another machine's caches
and cores (docs/machines.md).
"""

import os
import sys
import warnings
from types import ModuleType

from tilewise._environment import Pretended, pretended, refuse
from tilewise.errors import ConfigurationError


def _load() -> ModuleType | None:
    try:
        played = pretended()
    except ConfigurationError as error:
        refuse(error)
    if os.environ.get("TILEWISE_NATIVE", "1") == "0":
        return None
    if "t" in getattr(sys, "abiflags", ""):  # a free-threaded Python; loading them would switch its lock on again
        warnings.warn(
            "tilewise's compiled kernels expect the interpreter's lock, which this free-threaded Python does without, "
            "so the slower NumPy paths are used; a Python of the usual kind is fast",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    try:
        from tilewise import _native
    except ImportError:
        warnings.warn(
            "tilewise's compiled kernels are not installed, so the slower NumPy paths are used; "
            "install g++ and reinstall to get them",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    isa = os.environ.get("TILEWISE_ISA")
    if isa:
        try:
            _native.set_isa(isa)
        except ValueError as error:
            refuse(ConfigurationError(f"TILEWISE_ISA: {error}"))
    module: ModuleType = _native
    play(module, played)
    return module


def play(module: ModuleType, machine: Pretended) -> None:
    """Let the kernels take this machine for theirs."""
    l3 = -1 if machine.l3 == 0 else machine.l3 or 0
    module.pretend_machine(machine.l1 or 0, machine.l2 or 0, l3, machine.cores or 0)


native: ModuleType | None = _load()
