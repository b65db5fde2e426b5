"""The families of Triton kernels, one module per kind of kernel: problems, configurations, operands and launches."""
