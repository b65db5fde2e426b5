"""Measured kernels: the `Kernel` record, collections of kernels on disk, and importers for other tools' logs."""
