"""The compiled kernels, or None where they were not built.

Everything in tilewise works without them on NumPy paths; one warning says so. ``TILEWISE_NATIVE=0`` switches them off,
``TILEWISE_ISA=portable|avx2|avx512`` forces an instruction set, and ``TILEWISE_MACHINE`` plays another machine's caches
and cores (docs/machines.md).
"""

import os
import warnings
from types import ModuleType

from tilewise._environment import pretended, refuse
from tilewise.errors import ConfigurationError


def _load() -> ModuleType | None:
    try:
        played = pretended()
    except ConfigurationError as error:
        refuse(error)
    if os.environ.get("TILEWISE_NATIVE", "1") == "0":
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
    l3 = -1 if played.l3 == 0 else played.l3 or 0
    _native.pretend_machine(played.l1 or 0, played.l2 or 0, l3, played.cores or 0)
    module: ModuleType = _native
    return module


native: ModuleType | None = _load()
