"""Ragged batches: kernels of different sizes without padded graphs, and the sparse products over them.

The nodes of all kernels are concatenated; configurations are a (kernels, slots) grid with a mask, because training can
draw equally many for each kernel. Values of (node, configuration) pairs are (nodes, slots, width), and one product
aggregates neighbours for all configurations at once. Its matrix has a block per kernel and is stored in compressed rows
(CSR), or densely on a CPU if it is small. It is symmetric or is stored with its transpose, so the backward pass is
another such product.
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

from tilewise.costmodel.features.inputs import ModelInputs

# Entries, zeros between the blocks included, up to which one dense matrix is faster on a CPU: measured; insensitive
# between 1 << 15 and 1 << 18 (six baselines on batches of ten graphs of 20 to 80 nodes).
_MAX_DENSE_ENTRIES = 1 << 16

# Compressed rows have been "beta" in PyTorch for years; the products used here are covered by the tests.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


@dataclass(eq=False)
class SparseMatrix:
    """A matrix with its transpose, for autograd."""

    forward: Tensor
    transposed: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        """Multiply (rows, nodes) with (nodes, ...) along the first axis."""
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
    """Multiply a sparse matrix (r, n) by a tensor (n, ...): (r, ...)."""
    flat = x.reshape(len(x), -1)
    if matrix.layout == torch.strided:
        return torch.mm(matrix, flat.to(matrix.dtype)).to(x.dtype).view(matrix.shape[0], *x.shape[1:])
    # An empty matrix needs no product.
    if matrix._nnz() == 0:
        return x.new_zeros((matrix.shape[0], *x.shape[1:]))
    # Sparse products on a GPU need float32; autocast may have made x bfloat16.
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return torch.mm(matrix, flat).reshape(matrix.shape[0], *x.shape[1:])
    return torch.mm(matrix, flat.float()).to(x.dtype).reshape(matrix.shape[0], *x.shape[1:])


def sparse_matrix(
    rows: npt.NDArray[Any],
    columns: npt.NDArray[Any],
    values: npt.NDArray[Any],
    shape: tuple[int, int],
    device: str,
    *,
    symmetric: bool = False,
) -> SparseMatrix:
    """Build a sparse matrix and its transpose from (row, column, value) entries.

    Entries at equal positions are summed.
    """
    matrix = _faster_format(rows, columns, values, shape, device)
    return SparseMatrix(matrix, matrix if symmetric else _faster_format(columns, rows, values, shape[::-1], device))


def _faster_format(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], shape: tuple[int, int], device: str
) -> Tensor:
    """Build a tensor from (row, column, value) entries, dense or sparse, whichever multiplies faster."""
    if device == "cpu" and shape[0] * shape[1] <= _MAX_DENSE_ENTRIES:
        dense = np.bincount(rows * shape[1] + columns, values, minlength=shape[0] * shape[1])
        return torch.from_numpy(dense.astype(np.float32)).view(shape)
    entries = torch.from_numpy(np.stack([rows, columns])), torch.from_numpy(values.astype(np.float32))
    return torch.sparse_coo_tensor(*entries, shape, check_invariants=False).coalesce().to_sparse_csr().to(device)


def _run_starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the start index of each run from the lengths of the runs: an exclusive cumulative sum."""
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


@dataclass(eq=False)
class KernelBatch:
    """K kernels with N nodes in all and C configuration slots each; `mask` is False where a slot is padding."""

    node: Tensor  # (N, F)
    opcode: Tensor  # (N,)
    config: Tensor  # (K, C, D)
    mask: Tensor  # (K, C)
    target: Tensor  # (K, C), zero where unknown
    node_counts: npt.NDArray[np.int64]  # (K,)
    inputs: Sequence[ModelInputs]  # of each kernel; the matrices below are built from them on first use

    @property
    def n_nodes(self) -> int:
        return len(self.opcode)

    @property
    def device(self) -> str:
        return str(self.node.device)

    @cached_property
    def node_slots(self) -> Tensor:
        """Return a mask (K, most nodes), True where a kernel has a node."""
        counts = torch.as_tensor(self.node_counts, device=self.device)
        return torch.arange(int(self.node_counts.max()), device=self.device)[None] < counts[:, None]

    def pad_nodes(self, x: Tensor) -> Tensor:
        """Scatter values of nodes (N, d) to (K, largest number of nodes, d), zero at padding."""
        padded = x.new_zeros((*self.node_slots.shape, x.shape[-1]))
        padded[self.node_slots] = x
        return padded

    @cached_property
    def kernel_of_node(self) -> Tensor:
        """Return the kernel index of every node, (N,)."""
        return torch.from_numpy(np.repeat(np.arange(len(self.node_counts)), self.node_counts)).to(self.device)

    @cached_property
    def edges(self) -> npt.NDArray[np.int64]:
        """Return the edges [consumer, producer] of all graphs, (M, 2), with node numbers of the whole batch."""
        first = _run_starts(self.node_counts)
        return np.concatenate([kernel.edges.astype(np.int64) + first[row] for row, kernel in enumerate(self.inputs)])

    @cached_property
    def neighbour_lists(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return A + Aᵀ as neighbour lists for the compiled kernels; a repeated edge counts every time.

        The three arrays are the first node of each kernel (K + 1,), the first neighbour of each node (N + 1,), and the
        neighbours, numbered within their kernel.
        """
        local = np.concatenate([kernel.edges for kernel in self.inputs])
        rows, columns = self.edges[:, ::-1].T.ravel(), local.T.ravel()
        first_neighbour = np.cumsum(np.bincount(rows + 1, minlength=self.n_nodes + 1))
        neighbours = columns[np.argsort(rows, kind="stable")].astype(np.int32)
        return np.append(_run_starts(self.node_counts), self.n_nodes), first_neighbour, neighbours

    @cached_property
    def neighbours(self) -> SparseMatrix:
        """Return A + Aᵀ, the symmetric adjacency matrix of the batch (N, N)."""
        rows, columns = self.edges[:, ::-1].T.ravel(), self.edges.T.ravel()
        return sparse_matrix(rows, columns, np.ones(len(rows)), self._square, self.device, symmetric=True)

    @cached_property
    def degree(self) -> Tensor:
        """Number of neighbours of every node, (N,)."""
        return torch.from_numpy(np.bincount(self.edges.ravel(), minlength=self.n_nodes)).to(self.node)

    @cached_property
    def normalized_adjacency(self) -> tuple[SparseMatrix, SparseMatrix]:
        """Return A + I with rows divided by their sums, and its transpose; rows are producers, columns consumers."""
        both = sparse_matrix(*self._normalized_entries, self._square, self.device)
        return both, SparseMatrix(both.transposed, both.forward)

    @cached_property
    def gcn_matrix(self) -> SparseMatrix:
        """Return the sum of both `normalized_adjacency` matrices and I, which saves two products."""
        (u, v, values), every = self._normalized_entries, np.arange(self.n_nodes)
        rows, columns = np.concatenate([u, v, every]), np.concatenate([v, u, every])
        values = np.concatenate([values, values, np.ones(self.n_nodes)])
        return sparse_matrix(rows, columns, values, self._square, self.device, symmetric=True)

    @cached_property
    def _normalized_entries(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return rows, columns and values of the adjacency matrix with self-loops, rows summing to 1."""
        every = np.arange(self.n_nodes)
        rows, columns = np.concatenate([self.edges[:, 1], every]), np.concatenate([self.edges[:, 0], every])
        # Divide every row by its number of entries, the node itself included.
        return rows, columns, 1.0 / np.bincount(rows, minlength=self.n_nodes)[rows]

    @property
    def _square(self) -> tuple[int, int]:
        return self.n_nodes, self.n_nodes

    @cached_property
    def pooling(self) -> SparseMatrix:
        """Return the matrix (K, N) that sums the nodes of each kernel."""
        count, every = len(self.node_counts), np.arange(self.n_nodes)
        kernel = np.repeat(np.arange(count), self.node_counts)
        return sparse_matrix(kernel, every, np.ones(self.n_nodes), (count, self.n_nodes), self.device)


def collate(
    inputs: Sequence[ModelInputs], targets: Sequence[npt.NDArray[Any]] | None = None, device: str = "cpu"
) -> KernelBatch:
    """Build a batch from kernels' inputs and target runtimes.

    Kernels with fewer configurations are padded and masked.
    """
    slots = max(len(kernel.config) for kernel in inputs)
    config = np.empty((len(inputs), slots, inputs[0].config.shape[1]), np.float32)
    mask, target = np.zeros((len(inputs), slots), bool), np.zeros((len(inputs), slots), np.float32)
    for row, kernel in enumerate(inputs):
        count = len(kernel.config)
        config[row, :count] = kernel.config
        if count < slots:
            # Padding repeats a real configuration, so that it cannot produce infinities.
            config[row, count:] = kernel.config[0]
        mask[row, :count] = True
        if targets is not None:
            target[row, :count] = targets[row]
    return KernelBatch(
        node=torch.from_numpy(np.concatenate([kernel.node for kernel in inputs])).to(device),
        opcode=torch.from_numpy(np.concatenate([kernel.opcode for kernel in inputs])).to(device),
        config=torch.from_numpy(config).to(device),
        mask=torch.from_numpy(mask).to(device),
        target=torch.from_numpy(target).to(device),
        node_counts=np.array([len(kernel.node) for kernel in inputs]),
        inputs=inputs,
    )
