"""Measuring and tuning Triton kernels."""
