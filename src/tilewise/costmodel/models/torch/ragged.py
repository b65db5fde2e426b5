"""Batches of kernels of different sizes without padding the graphs, and the sparse products over them.

Nodes of all kernels lie one after another; configurations are a (kernels, slots) grid with a mask, since a slate is
chosen and can be chosen alike. Values per (node, configuration) pair are then (nodes, slots, width), and one product
aggregates neighbours for all configurations at once. Its matrix has a block for each kernel: small dense blocks on a
CPU, compressed rows for large graphs and on a GPU. It is symmetric or comes with its transpose, so the backward pass is
another such product. The matrices of a few small kernels are one dense matrix.
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

from tilewise.costmodel.features.neighbours import Neighbours
from tilewise.costmodel.features.scaling import ModelInputs

_DENSE_BLOCK = 96  # columns a block may have on average for dense products to be quicker than sparse ones
_DENSE_WHOLE = 1 << 14  # entries of a matrix, zeros between the blocks included, up to which one product is quicker

# Compressed rows have been "beta" in PyTorch for years; the products used here are covered by the tests.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


@dataclass(frozen=True, eq=False)
class Blocks:
    """A block-diagonal matrix of small dense blocks, one a kernel: on a CPU far quicker than compressed rows."""

    blocks: list[Tensor]
    n_rows: int

    def times(self, x: Tensor) -> Tensor:
        """Times (columns, width)."""
        result = x.new_empty((self.n_rows, x.shape[1]))
        row = column = 0
        for block in self.blocks:
            rows, columns = block.shape
            torch.mm(block, x[column : column + columns], out=result[row : row + rows])
            row, column = row + rows, column + columns
        return result


Matrix = Tensor | Blocks


@dataclass(eq=False)
class Sparse:
    """A matrix with its transpose."""

    forward: Matrix
    transposed: Matrix

    def __matmul__(self, x: Tensor) -> Tensor:
        """(rows, nodes) times (nodes, ...) over the first axis."""
        result: Tensor = _SparseProduct.apply(self.forward, self.transposed, x)  # type: ignore[no-untyped-call]
        return result


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Matrix, transposed: Matrix, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return product(matrix, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, product(ctx.transposed, grads[0])


def product(matrix: Matrix, x: Tensor) -> Tensor:
    """Matrix times everything behind the first axis of x."""
    flat = x.reshape(len(x), -1)
    if isinstance(matrix, Blocks):
        return matrix.times(flat).view(matrix.n_rows, *x.shape[1:])
    if matrix.layout == torch.strided:
        return torch.mm(matrix, flat.to(matrix.dtype)).to(x.dtype).view(matrix.shape[0], *x.shape[1:])
    if matrix._nnz() == 0:
        return x.new_zeros((matrix.shape[0], *x.shape[1:]))
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return torch.mm(matrix, flat).reshape(matrix.shape[0], *x.shape[1:])
    return torch.mm(matrix, flat.float()).to(x.dtype).reshape(matrix.shape[0], *x.shape[1:])


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a block-diagonal matrix with blocks of `heights` x `widths`; equal places add up."""

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    values: npt.NDArray[Any]
    heights: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]

    @property
    def transposed(self) -> Entries:
        return Entries(self.columns, self.rows, self.values, self.widths, self.heights)

    def matrix(self, device: str) -> Matrix:
        shape = int(self.heights.sum()), int(self.widths.sum())
        if device == "cpu" and shape[0] * shape[1] <= _DENSE_WHOLE:
            filled = np.bincount(self.rows * shape[1] + self.columns, self.values, minlength=shape[0] * shape[1])
            return torch.from_numpy(filled.astype(np.float32)).view(shape)
        if device == "cpu" and int(self.heights @ self.widths) <= _DENSE_BLOCK * shape[0]:
            return self._dense()
        return compressed(self.rows, self.columns, self.values, shape, device)

    def _dense(self) -> Blocks:
        """All blocks lie one after another in one vector, filled at once."""
        kernel = np.repeat(np.arange(len(self.heights)), self.heights)[self.rows]
        first_row, first_column = _starts(self.heights)[kernel], _starts(self.widths)[kernel]
        areas = self.heights * self.widths
        place = _starts(areas)[kernel] + (self.rows - first_row) * self.widths[kernel] + self.columns - first_column
        filled = torch.from_numpy(np.bincount(place, self.values, minlength=int(areas.sum())).astype(np.float32))
        shapes = zip(self.heights.tolist(), self.widths.tolist(), strict=True)
        pieces = torch.split(filled, areas.tolist())
        return Blocks([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], int(self.heights.sum()))

    def sparse(self, device: str) -> Sparse:
        return Sparse(self.matrix(device), self.transposed.matrix(device))


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


def compressed(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], shape: tuple[int, int], device: str
) -> Tensor:
    if device != "cpu":
        rows, columns, values = merged(rows, columns, values, shape[1])
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


def merged(
    rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], width: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """The same matrix with equal places added up: cuSPARSE refuses more entries than there are places."""
    places, inverse = np.unique(rows * width + columns, return_inverse=True)
    return places // max(width, 1), places % max(width, 1), np.bincount(inverse, values, minlength=len(places))


@dataclass(eq=False)
class Batch:
    """K kernels with N nodes in all and C configuration slots each; `mask` is False where a slot is padding."""

    node: Tensor  # (N, F)
    opcode: Tensor  # (N,)
    config: Tensor  # (K, C, D)
    mask: Tensor  # (K, C)
    target: Tensor  # (K, C), zero where unknown
    node_counts: npt.NDArray[np.int64]  # (K,)
    parts: Sequence[ModelInputs]  # for what is worked out only where a model asks for it

    @property
    def n_nodes(self) -> int:
        return len(self.opcode)

    @property
    def device(self) -> str:
        return str(self.node.device)

    @cached_property
    def kernel_of_node(self) -> Tensor:
        """(N,)."""
        return torch.from_numpy(np.repeat(np.arange(len(self.node_counts)), self.node_counts)).to(self.device)

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        first = _starts(self.node_counts)
        return np.concatenate([part.edges.astype(np.int64) + first[row] for row, part in enumerate(self.parts)])

    @property
    def consumer(self) -> npt.NDArray[np.int64]:
        """(M,) u of each row [u, v]."""
        return self._edges[:, 0]

    @property
    def producer(self) -> npt.NDArray[np.int64]:
        """(M,) v of each row [u, v]."""
        return self._edges[:, 1]

    @cached_property
    def graph(self) -> Neighbours:
        """A + A^T as the compiled kernels read it."""
        return Neighbours.concatenate([part.neighbours for part in self.parts])

    @cached_property
    def neighbours(self) -> Sparse:
        """A + A^T."""
        rows = np.concatenate([self.producer, self.consumer])
        columns = np.concatenate([self.consumer, self.producer])
        matrix = Entries(rows, columns, np.ones(len(rows)), self.node_counts, self.node_counts).matrix(self.device)
        return Sparse(matrix, matrix)

    @cached_property
    def spreading(self) -> Sparse:
        """(N, 2K): gives each node its kernel's first value plus its degree in A + A^T times its second."""
        every = np.arange(self.n_nodes)
        first = 2 * np.repeat(np.arange(len(self.node_counts)), self.node_counts)
        degree = np.bincount(np.concatenate([self.producer, self.consumer]), minlength=self.n_nodes)
        rows, columns = np.concatenate([every, every]), np.concatenate([first, first + 1])
        values = np.concatenate([np.ones(self.n_nodes), degree])
        return Entries(rows, columns, values, self.node_counts, np.full_like(self.node_counts, 2)).sparse(self.device)

    @cached_property
    def normalised(self) -> tuple[Sparse, Sparse]:
        """A + I over its row sums, and its transpose; rows are producers, columns consumers."""
        both = self._normalised.sparse(self.device)
        return both, Sparse(both.transposed, both.forward)

    @cached_property
    def mixing(self) -> Sparse:
        """The two of `normalised` and the identity, added up: one product in place of three terms."""
        one, every = self._normalised, np.arange(self.n_nodes)
        rows, columns = np.concatenate([one.rows, one.columns, every]), np.concatenate([one.columns, one.rows, every])
        values = np.concatenate([one.values, one.values, np.ones(self.n_nodes)])
        matrix = Entries(rows, columns, values, self.node_counts, self.node_counts).matrix(self.device)
        return Sparse(matrix, matrix)

    @cached_property
    def _normalised(self) -> Entries:
        every = np.arange(self.n_nodes)
        rows, columns = np.concatenate([self.producer, every]), np.concatenate([self.consumer, every])
        values = 1.0 / np.bincount(rows, minlength=self.n_nodes)[rows]
        return Entries(rows, columns, values, self.node_counts, self.node_counts)

    @cached_property
    def pooling(self) -> Sparse:
        """(K, N): sums the nodes of each kernel."""
        kernel, every = np.repeat(np.arange(len(self.node_counts)), self.node_counts), np.arange(self.n_nodes)
        ones = np.ones_like(self.node_counts)
        return Entries(kernel, every, np.ones(self.n_nodes), ones, self.node_counts).sparse(self.device)


def collate(
    parts: Sequence[ModelInputs], targets: Sequence[npt.NDArray[Any]] | None = None, device: str = "cpu"
) -> Batch:
    """ModelInputs kernels to one batch; shorter slates are padded by repeating the first configuration, masked out."""
    counts = np.array([len(part.node) for part in parts])
    slots = max(len(part.config) for part in parts)
    config = np.empty((len(parts), slots, parts[0].config.shape[1]), np.float32)
    mask, target = np.zeros((len(parts), slots), bool), np.zeros((len(parts), slots), np.float32)
    for row, part in enumerate(parts):
        filled = len(part.config)
        config[row, :filled] = part.config
        if filled < slots:
            config[row, filled:] = part.config[0]
        mask[row, :filled] = True
        if targets is not None:
            target[row, :filled] = targets[row]
    return Batch(
        torch.from_numpy(np.concatenate([part.node for part in parts])).to(device),
        torch.from_numpy(np.concatenate([part.opcode for part in parts])).to(device),
        torch.from_numpy(config).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(target).to(device),
        counts,
        parts,
    )
