"""Public names for users of Triton: `autotune` for their own kernels, `matmul` and `linear` for products.

The code is in `gpu/autotune.py` and `gpu/products/`.
"""

import importlib
from typing import Any

from tilewise.gpu.autotune import autotune

__all__ = ["autotune", "linear", "matmul"]


def __getattr__(name: str) -> Any:
    # Imported at first use, because products are built on the tuner.
    if name in ("linear", "matmul"):
        return getattr(importlib.import_module("tilewise.gpu.products"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
