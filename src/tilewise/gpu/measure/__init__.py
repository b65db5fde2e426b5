"""Measuring Triton kernels on a GPU."""
