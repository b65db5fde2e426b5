"""`tilewise.products`: the earlier name of `tilewise.gpu.products`, kept for existing code."""

from tilewise.gpu.products import linear, matmul

__all__ = ["linear", "matmul"]
