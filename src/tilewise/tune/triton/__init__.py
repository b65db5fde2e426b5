"""What users of Triton import: `autotune` for kernels of their own, `matmul` and `linear` for products.

`choose/autotune.py` and `choose/products.py` are the code.
"""

from tilewise.tune.choose.autotune import autotune
from tilewise.tune.choose.products import linear, matmul

__all__ = ["autotune", "linear", "matmul"]
