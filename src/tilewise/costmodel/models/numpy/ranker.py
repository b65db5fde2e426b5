"""TileRanker in plain NumPy: the same weights and function as the torch model, for scoring without torch.

Everything that depends on the kernel alone is computed once and folded into small matrices: the kernel's vector into
the biases, FiLM's scale into the blocks' weights, the attention query into the keys. A configuration then costs one
product with the first layer, two narrow products for attention and one per block. The rows of these products are all
(configuration, ensemble member) pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.features.inputs import ModelInputs

Floats = npt.NDArray[Any]  # float32, or float64 where close scores are computed again
Weights = Mapping[str, Floats]
Dense = tuple[Floats, Floats]  # a layer: kernel and bias

_CHUNK_ROWS = 1024  # (configuration, member) rows per chunk, so that they stay in the cache

_DENSE_NODES = 256  # graphs up to this size use dense matrices, which are then faster


@dataclass(frozen=True, eq=False)
class FoldedWeights:
    """Weights in the layout that scoring needs; independent of the kernel. H is the hidden width."""

    weights: Weights
    first: Floats  # (D, members * H): first layers of all members, with their input scalings multiplied in
    out: Floats  # (members * H,): last layers, divided by the number of members
    members: int
    global_width: int  # columns at the front of a configuration that describe the kernel
    gnn: list[Dense]
    films: list[tuple[Dense, Dense]]  # per block: the FiLM layer and the block's own layer


@dataclass(frozen=True, eq=False)
class KernelEncoding:
    """Weights of the configuration network after folding in one kernel with n nodes."""

    bias: Floats  # (H,): bias of the first layer
    attention: tuple[Floats, Floats, Floats]  # keys (H, n), key bias (n,), values (n, H)
    blocks: list[Dense]  # (H, H) and (H,) each


def fold(w: Weights, kwargs: Mapping[str, Any]) -> FoldedWeights:
    """Rearrange a model's weights for fast scoring; `kwargs` are the arguments of its constructor."""
    members = len(w["scaling"])
    return FoldedWeights(
        weights=w,
        first=first_layers(w),
        out=w["out"].reshape(-1) / w["out"].dtype.type(members),
        members=members,
        global_width=int(kwargs.get("global_width", 0)),
        gnn=_numbered_layers(w, "gnn"),
        films=list(zip(_numbered_layers(w, "film"), _numbered_layers(w, "blocks"), strict=True)),
    )


def _numbered_layers(w: Weights, name: str) -> list[Dense]:
    """Collect the layers `name.0`, `name.1` and so on."""
    count = next(number for number in itertools.count() if f"{name}.{number}.kernel" not in w)
    return [(w[f"{name}.{number}.kernel"], w[f"{name}.{number}.bias"]) for number in range(count)]


def first_layers(w: Weights) -> Floats:
    """Stack the first layers of all ensemble members: (D, members * H). Members scale the rows of one kernel."""
    kernels = w["scaling"].transpose(0, 2, 1) * w["config_in.kernel"]  # (members, D, H)
    return np.ascontiguousarray(kernels.transpose(1, 0, 2).reshape(kernels.shape[1], -1))


def encode(folded: FoldedWeights, inputs: ModelInputs) -> KernelEncoding:
    """Fold a kernel's graph into the weights; of its configurations, only the first's kernel-wide columns are read."""
    w = folded.weights
    nodes = encode_nodes(folded, inputs)
    kernel = encode_kernel(w, nodes, inputs.config[0, : folded.global_width])
    # Attention: logits = (h Wq + bq) keys^T, so Wq and bq can be multiplied with the keys once.
    keys, values = _dense(w, "key", nodes), _dense(w, "value", nodes)
    keys = keys / keys.dtype.type(math.sqrt(keys.shape[1]))
    attention = w["query.kernel"] @ keys.T, keys @ w["query.bias"], values
    # FiLM (Perez et al. 2018): (h W + b) * scale + shift is one layer with scaled columns.
    blocks: list[Dense] = []
    for (film, film_bias), (weight, bias) in folded.films:
        modulation = kernel @ film + film_bias
        scale, shift = 1 + modulation[: len(bias)], modulation[len(bias) :]
        blocks.append((weight * scale, bias * scale + shift))
    return KernelEncoding(w["config_in.bias"] + kernel, attention, blocks)


def encode_nodes(folded: FoldedWeights, inputs: ModelInputs) -> Floats:
    """Run the graph network over a kernel's nodes; returns (n, node_dim)."""
    w = folded.weights
    x = _relu(_dense(w, "node_in", np.concatenate([inputs.node, w["embedding.table"][inputs.opcode]], axis=1)))
    outward, inward = normalized_adjacency(inputs)
    for kernel, bias in folded.gnn:
        # Residual layer over both directions of the edges.
        x = x + _relu(np.concatenate([outward @ x, inward @ x], axis=1) @ kernel + bias)
    return x


def encode_kernel(w: Weights, nodes: Floats, kernel_wide: Floats) -> Floats:
    """Pool the node encodings (n, d) and join them with the kernel-wide inputs: (H,)."""
    # The mean describes the average node; the sum over sqrt(n) also grows with the graph.
    total, count = nodes.sum(axis=0), nodes.dtype.type(len(nodes))
    return _relu(_dense(w, "kernel_in", np.concatenate([total / count, total / np.sqrt(count), kernel_wide])))


def score_rows(folded: FoldedWeights, encoding: KernelEncoding, config: Floats) -> Floats:
    """Score configurations (C, global_width + D) of an encoded kernel in chunks: (C,)."""
    scores = np.empty(len(config), config.dtype)
    step = max(1, _CHUNK_ROWS // folded.members)
    for start in range(0, len(scores), step):
        rows = slice(start, start + step)
        own = config[rows, folded.global_width :]
        scores[rows] = score_hidden(folded, encoding, own @ folded.first)
        if "linear" in folded.weights:
            scores[rows] += own @ folded.weights["linear"]
    return scores


def score_hidden(folded: FoldedWeights, encoding: KernelEncoding, hidden: Floats) -> Floats:
    """Compute one score per configuration from the first layer's output (C, members * H), which is overwritten."""
    h = hidden.reshape(-1, len(encoding.bias))  # (C * members, H)
    zero = h.dtype.type(0)  # NumPy converts a Python 0 in every call, which takes longer than the comparison
    h += encoding.bias
    np.maximum(h, zero, out=h)
    h += _attend(h, *encoding.attention)
    for kernel, bias in encoding.blocks:
        inner = h @ kernel
        inner += bias
        h += np.maximum(inner, zero, out=inner)
    # One product applies every member's last layer and takes the mean.
    scores: Floats = h.reshape(-1, len(folded.out)) @ folded.out
    return scores


def _attend(h: Floats, keys: Floats, key_bias: Floats, values: Floats) -> Floats:
    """Return the attention of rows h (R, H) to the kernel's nodes, with these keys, key bias and values."""
    logits = keys.T @ h.T  # (n, R): there are few nodes, so reductions over them run along contiguous rows
    logits += key_bias[:, None]
    # Subtract the maximum so that exp cannot overflow.
    logits -= logits.max(axis=0)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=0)
    result: Floats = logits.T @ values
    return result


def _dense(w: Weights, name: str, x: Floats) -> Floats:
    return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


class NodeMatrix:
    """A sparse square matrix over the n nodes of one kernel; small ones are stored dense, which is faster."""

    def __init__(
        self, rows: npt.NDArray[Any], columns: npt.NDArray[Any], values: npt.NDArray[Any], n: int, dtype: Any
    ) -> None:
        """Build an n × n matrix from (row, column, value) entries; values at equal positions are added."""
        self.n, self.dense = n, None
        # Entries sorted by row allow `reduceat` to sum each row's terms.
        order = np.argsort(rows, kind="stable")
        self.rows, self.columns, self.values = rows[order], columns[order], values[order].astype(dtype)
        if self.n <= _DENSE_NODES:
            # `add.at` sums repeated edges.
            self.dense = np.zeros((self.n, self.n), dtype)
            np.add.at(self.dense, (rows, columns), values)

    def __matmul__(self, x: Floats) -> Floats:
        """Multiply along the second to last axis of (..., n, H)."""
        if self.dense is not None:
            return np.asarray(np.matmul(self.dense, x))
        result = np.zeros_like(x)
        # Rows without entries stay zero: `reduceat` cannot represent empty rows.
        rows, starts = np.unique(self.rows, return_index=True)
        if len(rows):
            terms = x[..., self.columns, :] * self.values[:, None]
            result[..., rows, :] = np.add.reduceat(terms, starts, axis=-2)
        return result


def normalized_adjacency(inputs: ModelInputs) -> tuple[NodeMatrix, NodeMatrix]:
    """Return (A + I) with each row divided by its sum, and its transpose."""
    # Edges point from consumer to producer; every node is its own neighbour once.
    n, every = len(inputs.node), np.arange(len(inputs.node))
    rows, columns = np.concatenate([inputs.edges[:, 1], every]), np.concatenate([inputs.edges[:, 0], every])
    values, dtype = 1.0 / np.bincount(rows, minlength=n)[rows], inputs.node.dtype
    return NodeMatrix(rows, columns, values, n, dtype), NodeMatrix(columns, rows, values, n, dtype)
