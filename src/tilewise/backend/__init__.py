"""Matmul and convolution on arrays: naive, blocked, NumPy and native, and the routing between them."""

from tilewise.backend import numpy_ops  # noqa: F401 - last: the plain NumPy implementations are asked last
from tilewise.backend.registry import Explanation, OptimizedBackend, current_backend, use_backend

__all__ = ["Explanation", "OptimizedBackend", "current_backend", "use_backend"]
