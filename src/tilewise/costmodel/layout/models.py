"""The two layout models: `LayoutSAGE` and `LayoutMPNN`; a lower score is faster.

Both encode a segment under K configurations at once as (K, E), add the encodings of a graph's segments, and score the
sums.

`LayoutSAGE` is the baseline: GraphSAGE (Hamilton et al. 2017) with a node's configuration added to its features.
`LayoutMPNN` is message passing (Gilmer et al. 2017) with other inputs: layouts are categories, together with the sizes
in the order of the layout, messages from producers and from consumers are distinguished, and nodes are pooled by the
elements they produce as well as by number. Attention between the configurations of a graph was not better (Kendall's
tau +0.01 on synthetic graphs, no more than the variation between seeds) and took half as much time again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.costmodel.data.schema import DIMENSIONS, LAYOUT_FEATURES, N_OPCODES
from tilewise.costmodel.layout.segments import GraphSegment
from tilewise.costmodel.models.torch.layers import Dense, OpcodeEmbedding, Stack, sage
from tilewise.costmodel.models.torch.ragged import SparseMatrix, sparse_matrix

_WIDTH = len(LAYOUT_FEATURES)
_CATEGORIES = DIMENSIONS + 1  # no dimension, or one of six
_LOG2_SIZE_SCALE = 8.0  # divides logarithms of sizes, so that a size of 256 becomes 1


class LayoutModel(nn.Module):
    """Interface of the layout models: encode each segment, add the encodings, score the sum."""

    def encode(self, segment: GraphSegment, config: Tensor) -> Tensor:
        """Encode a segment under K configurations (K, p, 18) of its p configurable nodes: (K, E)."""
        raise NotImplementedError

    def score(self, pooled: Tensor) -> Tensor:
        """Score K encodings summed over all segments of a graph, (K, E), as (K,); lower is faster."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tensor(self, array: Any) -> Tensor:
        """Copy an array to the model's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


class LayoutSAGE(LayoutModel):
    """GraphSAGE with the configuration added before the first layer, and mean pooling over nodes."""

    def __init__(self, node_width: int, hidden: int = 64, layers: int = 3, op_embed: int = 16) -> None:
        """Build the layers, with `op_embed` units per opcode and `hidden` units per layer."""
        super().__init__()
        self.opcodes = OpcodeEmbedding(N_OPCODES, op_embed)
        self.nodes, self.configs = Dense(node_width + op_embed, hidden), Dense(_WIDTH, hidden)
        self.layers = nn.ModuleList(Dense(2 * hidden, hidden) for _ in range(layers))
        self.head = Stack(hidden, (hidden, 1), "leaky_relu")

    def encode(self, segment: GraphSegment, config: Tensor) -> Tensor:
        """Return the mean over the segment's nodes of their final features: (K, E)."""
        nodes = torch.cat([self.tensor(segment.node), self.opcodes(self.tensor(segment.opcode))], 1)
        x = self.nodes(nodes)[:, None].expand(-1, len(config), -1)  # (s, K, H)
        config_encoding = self.configs(config.float() / DIMENSIONS).transpose(0, 1)  # (p, K, H)
        x = x.index_add(0, self.tensor(segment.config_nodes), config_encoding)
        x = functional.leaky_relu(x, 0.2)
        # One encoding per node and configuration from here on.
        matrix = _neighbours(segment, str(self.device))
        for layer in self.layers:
            x = sage(x, layer, matrix, "leaky_relu")  # type: ignore[arg-type]
        return x.sum(0) / segment.graph_nodes

    def score(self, pooled: Tensor) -> Tensor:
        return self.head(pooled)[:, 0]


class LayoutMPNN(LayoutModel):
    """Directed message passing with residual layers."""

    def __init__(self, node_width: int, hidden: int = 48, layers: int = 3, op_embed: int = 16) -> None:
        """Build the layers; their attribute names are the tensor names in model files."""
        super().__init__()
        self.opcodes = OpcodeEmbedding(N_OPCODES, op_embed)
        self.nodes = Stack(node_width + op_embed, (hidden, hidden), "gelu")
        self.configs = Stack(_WIDTH * _CATEGORIES + DIMENSIONS, (hidden, hidden), "gelu")
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.layers = nn.ModuleList(Stack(3 * hidden, (hidden, hidden), "gelu") for _ in range(layers))
        self.head = Stack(2 * hidden, (hidden, 1), "gelu")

    def encode(self, segment: GraphSegment, config: Tensor) -> Tensor:
        """Return the plain mean over nodes and the mean weighted by the nodes' element counts: (K, E)."""
        nodes = torch.cat([self.tensor(segment.node), self.opcodes(self.tensor(segment.opcode))], 1)
        x = self.nodes(nodes)[:, None].expand(-1, len(config), -1)  # (s, K, H)
        config_nodes = self.tensor(segment.config_nodes)
        features = _config_features(config, self.tensor(segment.sizes))
        x = x.index_add(0, config_nodes, self.configs(features).transpose(0, 1))  # adds (p, K, H)
        producers, consumers = _directed_means(segment, str(self.device))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            x = x + layer(torch.cat([y, producers @ y, consumers @ y], -1))
        # A sum over segments of both terms gives the means over the whole graph.
        share = self.tensor(segment.share)
        return torch.cat([x.sum(0) / segment.graph_nodes, torch.einsum("s,skh->kh", share, x)], 1)  # (K, 2H)

    def score(self, pooled: Tensor) -> Tensor:
        return self.head(pooled)[:, 0]


def _config_features(config: Tensor, sizes: Tensor) -> Tensor:
    """Encode layouts (K, p, 18) as one-hot digits and log sizes in layout order: (K, p, 132)."""
    layout = config.long().clamp(-1, DIMENSIONS - 1)
    categories = functional.one_hot(layout + 1, _CATEGORIES).flatten(2).float()
    # The first six numbers are the output's dimensions from minor to major.
    output = layout[:, :, :DIMENSIONS]
    ordered_sizes = sizes.expand(len(config), -1, -1).gather(2, output.clamp_min(0)) * (output >= 0)
    return torch.cat([categories, ordered_sizes / _LOG2_SIZE_SCALE], 2)


def _neighbours(segment: GraphSegment, device: str) -> SparseMatrix:
    """Return the symmetric adjacency matrix (s, s); it is its own transpose in the backward pass."""
    u, v = segment.edges.T
    rows, columns = np.concatenate([u, v]), np.concatenate([v, u])
    shape = len(segment.node), len(segment.node)
    return sparse_matrix(rows, columns, np.ones(len(rows)), shape, device, symmetric=True)


def _directed_means(segment: GraphSegment, device: str) -> tuple[SparseMatrix, SparseMatrix]:
    """Return matrices (s, s) that average over a node's producers and over its consumers."""
    consumer, producer = segment.edges.T
    return _mean_matrix(consumer, producer, segment, device), _mean_matrix(producer, consumer, segment, device)


def _mean_matrix(rows: Any, columns: Any, segment: GraphSegment, device: str) -> SparseMatrix:
    """Return the matrix that averages node features over `columns` for each of `rows` (edge ends): (s, s)."""
    shape = len(segment.node), len(segment.node)
    # Every entry of a row is one over the number of entries in that row.
    values = 1.0 / np.maximum(np.bincount(rows, minlength=len(segment.node)), 1)[rows]
    return sparse_matrix(rows, columns, values, shape, device)


MODELS: dict[str, type[LayoutModel]] = {"LayoutSAGE": LayoutSAGE, "LayoutMPNN": LayoutMPNN}
