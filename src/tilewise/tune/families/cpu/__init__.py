"""The families of native kernels on this CPU."""
