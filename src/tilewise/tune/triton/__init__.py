"""What users of Triton import: `autotune` for kernels of their own, `matmul` and `linear` for products.

`choose/autotune.py` and `products/choose.py` are the code.
"""

import importlib
from typing import Any

from tilewise.gpu.autotune import autotune

__all__ = ["autotune", "linear", "matmul"]


def __getattr__(name: str) -> Any:
    # At its first use: products are built on the tuner, not the other way round.
    if name in ("linear", "matmul"):
        return getattr(importlib.import_module("tilewise.gpu.products"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
