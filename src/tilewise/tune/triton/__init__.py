"""Public names for users of Triton: `autotune` for their own kernels, `matmul` and `linear` for products.

The code is in `gpu/autotune.py` and `gpu/products/`.
"""

from tilewise._late import late_names
from tilewise.gpu.autotune import autotune

__all__ = ["autotune", "linear", "matmul"]

__getattr__ = late_names(__name__, {"tilewise.gpu.products": "linear matmul"})  # products are built on the tuner
