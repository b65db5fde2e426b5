"""Batches of kernels of different sizes without padding the graphs, and the sparse products over them.

Nodes of all kernels lie one after another; configurations are a (kernels, slots) grid with a mask, since a slate is
chosen and can be chosen alike. Values per (node, configuration) pair are then (nodes, slots, width), and one
compressed-row sparse product aggregates neighbours for all configurations at once. The matrices used here are
symmetric or come with their transpose, so the backward pass is another such product.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewise.costmodel.prepare import Prepared

# Compressed rows have been "beta" in PyTorch for years; the products used here are covered by the tests.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


@dataclass(eq=False)
class Sparse:
    """A compressed-row matrix with its transpose."""

    forward: Tensor
    transposed: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        """(rows, nodes) times (nodes, ...) over the first axis."""
        result: Tensor = _SparseProduct.apply(self.forward, self.transposed, x)  # type: ignore[no-untyped-call]
        return result


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return product(matrix, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, product(ctx.transposed, grads[0])


def product(matrix: Tensor, x: Tensor) -> Tensor:
    """Sparse matrix times everything behind the first axis of x."""
    flat = x.reshape(len(x), -1)
    if matrix._nnz() == 0:
        return x.new_zeros((matrix.shape[0], *x.shape[1:]))
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return torch.mm(matrix, flat).reshape(matrix.shape[0], *x.shape[1:])
    return torch.mm(matrix, flat.float()).to(x.dtype).reshape(matrix.shape[0], *x.shape[1:])


def compressed(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], shape: tuple[int, int], device: str
) -> Tensor:
    order = np.argsort(rows, kind="stable")
    starts = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=starts[1:])
    return torch.sparse_csr_tensor(
        torch.from_numpy(starts),
        torch.from_numpy(columns[order].astype(np.int64)),
        torch.from_numpy(values[order].astype(np.float32)),
        shape,
        check_invariants=False,
    ).to(device)


@dataclass(eq=False)
class Batch:
    """K kernels with N nodes in all and C configuration slots each; `mask` is False where a slot is padding."""

    node: Tensor  # (N, F)
    opcode: Tensor  # (N,)
    kernel_of_node: Tensor  # (N,)
    config: Tensor  # (K, C, D)
    mask: Tensor  # (K, C)
    target: Tensor  # (K, C), zero where unknown
    consumer: npt.NDArray[np.int64]  # (M,) u of each row [u, v]
    producer: npt.NDArray[np.int64]  # (M,) v
    node_counts: npt.NDArray[np.int64]  # (K,)

    @property
    def n_nodes(self) -> int:
        return len(self.opcode)

    @property
    def device(self) -> str:
        return str(self.node.device)

    @cached_property
    def neighbours(self) -> Sparse:
        """A + A^T."""
        rows = np.concatenate([self.producer, self.consumer])
        columns = np.concatenate([self.consumer, self.producer])
        matrix = compressed(rows, columns, np.ones(len(rows)), (self.n_nodes, self.n_nodes), self.device)
        return Sparse(matrix, matrix)

    @cached_property
    def spreading(self) -> Sparse:
        """(N, 2K): gives each node its kernel's first value plus its degree in A + A^T times its second."""
        n_kernels, every = len(self.node_counts), np.arange(self.n_nodes)
        kernel = np.repeat(np.arange(n_kernels), self.node_counts)
        degree = np.bincount(np.concatenate([self.producer, self.consumer]), minlength=self.n_nodes)
        rows, columns = np.concatenate([every, every]), np.concatenate([kernel, kernel + n_kernels])
        values = np.concatenate([np.ones(self.n_nodes), degree])
        return Sparse(
            compressed(rows, columns, values, (self.n_nodes, 2 * n_kernels), self.device),
            compressed(columns, rows, values, (2 * n_kernels, self.n_nodes), self.device),
        )

    @cached_property
    def normalised(self) -> tuple[Sparse, Sparse]:
        """A + I over its row sums, and its transpose; rows are producers, columns consumers."""
        every = np.arange(self.n_nodes)
        rows, columns = np.concatenate([self.producer, every]), np.concatenate([self.consumer, every])
        values = 1.0 / np.bincount(rows, minlength=self.n_nodes)[rows]
        shape = (self.n_nodes, self.n_nodes)
        matrix = compressed(rows, columns, values, shape, self.device)
        transposed = compressed(columns, rows, values, shape, self.device)
        return Sparse(matrix, transposed), Sparse(transposed, matrix)

    @cached_property
    def pooling(self) -> Sparse:
        """(K, N): sums the nodes of each kernel."""
        kernel, every = np.repeat(np.arange(len(self.node_counts)), self.node_counts), np.arange(self.n_nodes)
        ones, n_kernels = np.ones(self.n_nodes), len(self.node_counts)
        return Sparse(
            compressed(kernel, every, ones, (n_kernels, self.n_nodes), self.device),
            compressed(every, kernel, ones, (self.n_nodes, n_kernels), self.device),
        )


def collate(parts: Sequence[Prepared], targets: Sequence[npt.NDArray[Any]] | None = None, device: str = "cpu") -> Batch:
    """Prepared kernels to one batch; shorter slates are padded by repeating the first configuration, masked out."""
    counts = np.array([len(part.node) for part in parts])
    first = np.concatenate([[0], np.cumsum(counts)])
    slots = max(len(part.config) for part in parts)
    config = np.empty((len(parts), slots, parts[0].config.shape[1]), np.float32)
    mask, target = np.zeros((len(parts), slots), bool), np.zeros((len(parts), slots), np.float32)
    for row, part in enumerate(parts):
        filled = len(part.config)
        config[row, :filled], config[row, filled:] = part.config, part.config[0]
        mask[row, :filled] = True
        if targets is not None:
            target[row, :filled] = targets[row]
    edges = np.concatenate([part.edges.astype(np.int64) + first[row] for row, part in enumerate(parts)])
    return Batch(
        torch.from_numpy(np.concatenate([part.node for part in parts])).to(device),
        torch.from_numpy(np.concatenate([part.opcode for part in parts])).to(device),
        torch.from_numpy(np.repeat(np.arange(len(parts)), counts)).to(device),
        torch.from_numpy(config).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(target).to(device),
        edges[:, 0],
        edges[:, 1],
        counts,
    )
