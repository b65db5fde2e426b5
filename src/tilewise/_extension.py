"""Load the compiled kernels; `native` is None if they are not installed.

Everything in tilewise works without them on NumPy paths, after one warning. ``TILEWISE_NATIVE=0`` switches them off,
``TILEWISE_ISA=portable|avx2|avx512`` forces an instruction set, and ``TILEWISE_MACHINE`` emulates another machine's
caches and cores (docs/machines.md).
"""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise._environment import MachineOverride


def _load() -> ModuleType | None:
    """Import the extension and apply the environment variables to it."""
    override = _machine_override() if "TILEWISE_MACHINE" in os.environ else None
    if os.environ.get("TILEWISE_NATIVE", "1") == "0":
        return None
    if "t" in getattr(sys, "abiflags", ""):  # free-threaded Python: importing the extension would enable the GIL again
        warnings.warn(
            "tilewise's compiled kernels need the global interpreter lock, which this free-threaded Python does not "
            "have, so the slower NumPy paths are used; use a standard Python build to get the kernels",
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
            from tilewise._environment import abort_import

            abort_import(ConfigurationError(f"TILEWISE_ISA: {error}"))
    module: ModuleType = _native
    if override is not None:
        emulate_machine(module, override)
    return module


def _machine_override() -> MachineOverride:
    """Parse ``TILEWISE_MACHINE``; stop the import if it is invalid."""
    from tilewise._environment import abort_import, machine_override

    try:
        return machine_override()
    except ConfigurationError as error:
        abort_import(error)


def emulate_machine(module: ModuleType, machine: MachineOverride) -> None:
    """Make the kernels use these cache sizes and this core count instead of the real ones."""
    l3 = -1 if machine.l3 == 0 else machine.l3 or 0  # the extension reads 0 as "real value", -1 as "no L3"
    module.pretend_machine(machine.l1 or 0, machine.l2 or 0, l3, machine.cores or 0)


native: ModuleType | None = _load()
