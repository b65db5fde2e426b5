"""Times sparse layers: linear ones against SciPy's and PyTorch's CSR and the best dense product, convolutions against
dense ones, and int8 layers against the dense int8 layer.

    python -m benchmarks.sparse [--threads 1] [--json benchmarks/results/sparse.json]

A ratio above 1 means the sparse layer is faster than the fastest peer, dense ones included. The sparse kernels are
forced here; left to itself a layer would use the dense product where the ratio is below 1.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import tilewise
from benchmarks.harness import Row, Run, compare, write_results
from tilewise import nn
from tilewise.backend import current_backend, matmul_native
from tilewise.prune import MagnitudePruner, SparseConv2d, SparseInt8Linear, SparseLinear
from tilewise.quantize import QuantizedLinear

SHAPES, SPARSITIES, BATCHES = [(1024, 1024), (4096, 1024)], (0.7, 0.9), (1, 32, 128)
CONVOLUTIONS = [  # images, channels, filters, height and width, kernel
    (1, 64, 64, 16, 1),
    (8, 128, 128, 16, 1),
    (1, 256, 512, 14, 1),
    (1, 64, 64, 32, 3),
    (8, 128, 128, 16, 3),
    (1, 128, 256, 14, 3),
]


def layer(outputs: int, inputs: int, sparsity: float, batch: int, threads: int, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    weight = MagnitudePruner().prune(rng.standard_normal((outputs, inputs)).astype(np.float32), sparsity)
    x = rng.standard_normal((batch, inputs)).astype(np.float32)
    ours, columns = SparseLinear.from_weights(weight, always_sparse=True), np.ascontiguousarray(x.T)
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
        **scipy_runs(weight, columns),
        "pytorch csr": lambda: torch_csr @ torch_columns,
    }
    return compare(f"{outputs}×{inputs} at {sparsity:.0%}, batch {batch}", threads, runs, 0.6)


def scipy_runs(weight: np.ndarray, columns: np.ndarray) -> dict[str, Run]:
    """SciPy's product, where it is installed."""
    try:
        import scipy.sparse
    except ImportError:
        return {}
    csr = scipy.sparse.csr_matrix(weight)
    return {"scipy csr": lambda: csr @ columns}


def convolution(case: tuple[int, int, int, int, int], sparsity: float, threads: int, seed: int) -> Row:
    images, channels, filters, size, kernel = case
    rng = np.random.default_rng(seed)
    weight = MagnitudePruner().prune(
        rng.standard_normal((filters, channels, kernel, kernel)).astype(np.float32), sparsity
    )
    x = rng.standard_normal((images, channels, size, size)).astype(np.float32)
    padding = (kernel // 2, kernel // 2)
    ours = SparseConv2d.from_weights(weight, None, (1, 1), padding, always_sparse=True)
    torch_x, torch_weight, backend = torch.from_numpy(x), torch.from_numpy(weight), current_backend()
    expected = torch.nn.functional.conv2d(torch_x, torch_weight, padding=padding).numpy()
    if np.abs(ours(x).data - expected).max() > 1e-4 * np.abs(expected).max():
        raise SystemExit("the sparse convolution is wrong")
    runs = {
        "tilewise": lambda: ours(x),
        "tilewise dense": lambda: backend.dispatch("conv2d", x, weight, None, stride=(1, 1), padding=padding),
        "pytorch dense": lambda: torch.nn.functional.conv2d(torch_x, torch_weight, padding=padding),
    }
    name = f"{kernel}×{kernel} {channels}→{filters}, {images}×{size}², {sparsity:.0%}"
    return compare(name, threads, runs, 0.4)


def int8_layer(outputs: int, inputs: int, sparsity: float, batch: int, threads: int, seed: int) -> Row:
    linear = nn.Linear(inputs, outputs, rng=seed)
    linear.weight.data[...] = MagnitudePruner().prune(linear.weight.data, sparsity)
    ours, dense = SparseInt8Linear.from_dense(linear, always_sparse=True), QuantizedLinear.from_float(linear)
    x = np.random.default_rng(seed).standard_normal((batch, inputs)).astype(np.float32)
    if np.abs(ours(x).data - dense(x).data).max() > 1e-4:
        raise SystemExit("the sparse int8 product is wrong")
    runs = {"tilewise": lambda: ours(x), "tilewise dense int8": lambda: dense(x)}
    return compare(f"int8 {outputs}×{inputs} at {sparsity:.0%}, batch {batch}", threads, runs, 0.3)


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
        rows = [layer(*case, options.threads, options.seed) for case in cases]
        rows += [convolution(c, p, options.threads, options.seed) for c in CONVOLUTIONS for p in SPARSITIES]
        rows += [int8_layer(*case, options.threads, options.seed) for case in cases]
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
