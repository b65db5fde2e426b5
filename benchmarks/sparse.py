"""Sparse linear layers beside SciPy's and PyTorch's CSR and the best dense product.

    python -m benchmarks.sparse [--threads 1] [--json benchmarks/results/sparse.json]

A ratio above 1 means the sparse layer is faster than the fastest peer, dense ones included.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from threadpoolctl import threadpool_limits

import tilewise
from benchmarks.harness import Row, compare, write_results
from tilewise.backend import matmul_native
from tilewise.prune import MagnitudePruner, SparseLinear

SHAPES, SPARSITIES, BATCHES = [(1024, 1024), (4096, 1024)], (0.7, 0.9), (1, 32, 128)


def layer(outputs: int, inputs: int, sparsity: float, batch: int, threads: int, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    weight = MagnitudePruner().prune(rng.standard_normal((outputs, inputs)).astype(np.float32), sparsity)
    x = rng.standard_normal((batch, inputs)).astype(np.float32)
    ours, csr, columns = (
        SparseLinear(weight, always_sparse=True),
        scipy.sparse.csr_matrix(weight),
        np.ascontiguousarray(x.T),
    )
    dense, rows, torch_columns = torch.from_numpy(weight), torch.from_numpy(x), torch.from_numpy(columns)
    torch_csr = dense.to_sparse_csr()
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    if np.abs(ours(x).data - exact).max() > 1e-5 * np.abs(exact).max():
        raise SystemExit("the sparse product is wrong")
    runs = {
        "tilewise": lambda: ours(x),
        "tilewise dense": lambda: matmul_native(x, weight.T),
        "numpy dense": lambda: x @ weight.T,
        "pytorch dense": lambda: torch.nn.functional.linear(rows, dense),
        "scipy csr": lambda: csr @ columns,
        "pytorch csr": lambda: torch_csr @ torch_columns,
    }
    return compare(f"{outputs}×{inputs} at {sparsity:.0%}, batch {batch}", threads, runs, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/sparse.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    with threadpool_limits(options.threads, "blas"):
        cases = [(*s, p, b) for s in SHAPES for p in SPARSITIES for b in BATCHES]
        write_results(options.json, [layer(*case, options.threads, options.seed) for case in cases])


if __name__ == "__main__":
    main()
