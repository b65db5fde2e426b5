"""Matmul and convolution on arrays: naive, blocked, NumPy and native, and the routing between them."""

from tilewise.backend import numpy_ops, numpy_training, rows  # noqa: F401 - importing registers their operations
from tilewise.backend.registry import Explanation, OptimizedBackend, current_backend, use_backend

__all__ = ["Explanation", "OptimizedBackend", "current_backend", "use_backend"]
