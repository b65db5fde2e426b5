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
from tilewise.costmodel.features.scaling import Neighbours

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
    """Multiply a matrix with x, whose axes after the first are flattened."""
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


@dataclass(frozen=True, eq=False)
class BlockDiagonalEntries:
    """Entries of a block-diagonal matrix with blocks of `heights` x `widths`; repeated positions are summed."""

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    values: npt.NDArray[Any]
    heights: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]

    @property
    def transposed(self) -> BlockDiagonalEntries:
        """The entries of the transposed matrix."""
        return BlockDiagonalEntries(self.columns, self.rows, self.values, self.widths, self.heights)

    def matrix(self, device: str) -> Tensor:
        """Build the matrix in the format that is fastest for its size and device."""
        shape = int(self.heights.sum()), int(self.widths.sum())
        if device == "cpu" and shape[0] * shape[1] <= _MAX_DENSE_ENTRIES:
            dense = np.bincount(self.rows * shape[1] + self.columns, self.values, minlength=shape[0] * shape[1])
            return torch.from_numpy(dense.astype(np.float32)).view(shape)
        return csr_tensor(self.rows, self.columns, self.values, shape, device)

    def with_transpose(self, device: str) -> SparseMatrix:
        """Build the matrix and its transpose, which the backward pass multiplies with."""
        return SparseMatrix(self.matrix(device), self.transposed.matrix(device))


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the first index of each run, given the lengths of the runs."""
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


def csr_tensor(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], shape: tuple[int, int], device: str
) -> Tensor:
    """Build a CSR tensor from coordinates."""
    if device != "cpu":
        rows, columns, values = sum_duplicates(rows, columns, values, shape[1])
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


def sum_duplicates(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], width: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Sum entries at equal positions: cuSPARSE rejects more entries than the matrix has positions."""
    positions, inverse = np.unique(rows * width + columns, return_inverse=True)
    return positions // max(width, 1), positions % max(width, 1), np.bincount(inverse, values, minlength=len(positions))


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
        """True where a kernel has a node, (K, largest number of nodes)."""
        counts = torch.as_tensor(self.node_counts, device=self.device)
        return torch.arange(int(self.node_counts.max()), device=self.device)[None] < counts[:, None]

    def pad_nodes(self, x: Tensor) -> Tensor:
        """Scatter values of nodes (N, d) to (K, largest number of nodes, d), zero at padding."""
        padded = x.new_zeros((*self.node_slots.shape, x.shape[-1]))
        padded[self.node_slots] = x
        return padded

    @cached_property
    def kernel_of_node(self) -> Tensor:
        """Kernel index of every node, (N,)."""
        return torch.from_numpy(np.repeat(np.arange(len(self.node_counts)), self.node_counts)).to(self.device)

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        """Return the edges of all graphs, with node numbers that count through the batch."""
        first = _starts(self.node_counts)
        return np.concatenate([kernel.edges.astype(np.int64) + first[row] for row, kernel in enumerate(self.inputs)])

    @property
    def consumer(self) -> npt.NDArray[np.int64]:
        """First node u of each edge [u, v], (M,)."""
        return self._edges[:, 0]

    @property
    def producer(self) -> npt.NDArray[np.int64]:
        """Second node v of each edge [u, v], (M,)."""
        return self._edges[:, 1]

    @cached_property
    def graph(self) -> Neighbours:
        """A + A^T in the format of the compiled kernels."""
        return Neighbours.concatenate([kernel.neighbours for kernel in self.inputs])

    @cached_property
    def neighbours(self) -> SparseMatrix:
        """A + A^T."""
        rows = np.concatenate([self.producer, self.consumer])
        columns = np.concatenate([self.consumer, self.producer])
        # A + A^T is symmetric, so it is its own transpose.
        matrix = BlockDiagonalEntries(rows, columns, np.ones(len(rows)), self.node_counts, self.node_counts).matrix(
            self.device
        )
        return SparseMatrix(matrix, matrix)

    @cached_property
    def config_to_nodes(self) -> SparseMatrix:
        """Matrix (N, 2K) that maps two values per kernel to its nodes: the first plus degree times the second."""
        every = np.arange(self.n_nodes)
        first = 2 * np.repeat(np.arange(len(self.node_counts)), self.node_counts)
        degree = np.bincount(np.concatenate([self.producer, self.consumer]), minlength=self.n_nodes)
        rows, columns = np.concatenate([every, every]), np.concatenate([first, first + 1])
        values = np.concatenate([np.ones(self.n_nodes), degree])
        return BlockDiagonalEntries(
            rows, columns, values, self.node_counts, np.full_like(self.node_counts, 2)
        ).with_transpose(self.device)

    @cached_property
    def normalized_adjacency(self) -> tuple[SparseMatrix, SparseMatrix]:
        """A + I divided by its row sums, and its transpose; rows are producers, columns consumers."""
        both = self._normalized_entries.with_transpose(self.device)
        return both, SparseMatrix(both.transposed, both.forward)

    @cached_property
    def gcn_matrix(self) -> SparseMatrix:
        """Sum of both `normalized_adjacency` matrices and the identity: one product instead of three."""
        one, every = self._normalized_entries, np.arange(self.n_nodes)
        rows, columns = np.concatenate([one.rows, one.columns, every]), np.concatenate([one.columns, one.rows, every])
        values = np.concatenate([one.values, one.values, np.ones(self.n_nodes)])
        matrix = BlockDiagonalEntries(rows, columns, values, self.node_counts, self.node_counts).matrix(self.device)
        return SparseMatrix(matrix, matrix)

    @cached_property
    def _normalized_entries(self) -> BlockDiagonalEntries:
        every = np.arange(self.n_nodes)
        rows, columns = np.concatenate([self.producer, every]), np.concatenate([self.consumer, every])
        # Divide every row by its number of entries, the node itself included.
        values = 1.0 / np.bincount(rows, minlength=self.n_nodes)[rows]
        return BlockDiagonalEntries(rows, columns, values, self.node_counts, self.node_counts)

    @cached_property
    def pooling(self) -> SparseMatrix:
        """Matrix (K, N) that sums the nodes of each kernel."""
        kernel, every = np.repeat(np.arange(len(self.node_counts)), self.node_counts), np.arange(self.n_nodes)
        ones = np.ones_like(self.node_counts)
        return BlockDiagonalEntries(kernel, every, np.ones(self.n_nodes), ones, self.node_counts).with_transpose(
            self.device
        )


def collate(
    inputs: Sequence[ModelInputs], targets: Sequence[npt.NDArray[Any]] | None = None, device: str = "cpu"
) -> KernelBatch:
    """Build a batch; missing configurations are padded by repeating the first one, and masked."""
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
