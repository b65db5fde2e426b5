"""The programs whose kernels are measured, as tables; `python -m tools.workloads` writes them for the package."""
