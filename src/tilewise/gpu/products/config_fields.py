"""Fields of a matrix product's configuration, by the names that stored files use.

Measurement stores, choice caches and recorded benchmarks spell some fields in older words than the code. This module
is the only place that knows both spellings.
"""

from __future__ import annotations

from tilewise.store.problem import Config

SPLIT_K = "parts"  # slices that K is cut into for every output tile; 1 leaves K whole
STREAM_K = "tail"  # 1: K is cut for the tiles of the last, partly filled wave only
TRANSPOSED = "swapped"  # 1: the kernel computes the transposed product, for small m
_CUBLAS = "library"  # set in configurations that are a call of cuBLAS and not a kernel

CUBLAS = Config({_CUBLAS: 1})
# `addmm` with the bias added inside cuBLAS; without it PyTorch copies the bias into the output first.
CUBLAS_FUSED_BIAS = Config({_CUBLAS: 2})


def is_cublas(config: Config) -> bool:
    """Tell a call of cuBLAS from a kernel with a tile."""
    return _CUBLAS in config
