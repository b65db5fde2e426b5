"""Scoring without PyTorch: the same weights and functions in NumPy and compiled kernels."""
