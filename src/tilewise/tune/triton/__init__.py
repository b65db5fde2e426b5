"""`autotune` for Triton kernels, where its users import it from; `choose/autotune.py` is the code."""

from tilewise.tune.choose.autotune import autotune

__all__ = ["autotune"]
