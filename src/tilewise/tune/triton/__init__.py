"""Measuring and tuning Triton kernels."""

from tilewise.tune.triton.autotune import autotune

__all__ = ["autotune"]
