"""Measured kernels: one kernel, files of many, and other tools' logs made into either."""
