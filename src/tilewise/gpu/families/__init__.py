"""The families of Triton kernels, one module per kind of kernel."""
