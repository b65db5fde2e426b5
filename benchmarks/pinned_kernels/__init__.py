"""Triton kernels as other people write them, each with its own list of configurations, for `benchmarks.pinned`.

They follow the styles of Triton's tutorials, of Liger (norms, losses, gated activations), of FLA (chunked scans) and of
vLLM, but are written for this benchmark. `CASES` lists them all.
"""

from benchmarks.pinned_kernels import (  # each registers its cases
    attention,
    chunks,
    elementwise,
    gathers,
    products,
    quantized,
    rows,
)
from benchmarks.pinned_kernels.registry import CASES, ForeignCase

__all__ = [
    "CASES",
    "ForeignCase",
    "attention",
    "chunks",
    "elementwise",
    "gathers",
    "products",
    "quantized",
    "rows",
]
