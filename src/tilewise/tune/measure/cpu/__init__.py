"""Measuring the native kernels of this CPU."""
