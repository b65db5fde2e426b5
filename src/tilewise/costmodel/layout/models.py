"""The two layout models. Both encode a segment under K configurations at once into (K, E), add up the segments of a
graph, and score the sums; a lower score is faster.

`LayoutSAGE` is the baseline: GraphSAGE, with a node's configuration joined to its features. `LayoutAttention` differs
in what it is told and in how it compares. Layouts enter as categories and as the sizes they put side by side; messages
know whether they come from a producer or a consumer; nodes count by the bytes they produce as well as by number; and at
every configurable node, and again for the whole graph, a configuration attends to others of the same graph. What all
configurations have in common, which tells nothing about their order, can so be taken out where it arises.

The first `references` of the K rows are those attended to. In training that is the whole slate; a prediction puts the
same few in front of every chunk, so that a score does not depend on which others it was computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.costmodel.data.schema import DIMENSIONS, LAYOUT_FEATURES, N_OPCODES
from tilewise.costmodel.layout.segments import Segment
from tilewise.costmodel.models.torch.layers import Dense, Embedding, Layer, Stack, sage
from tilewise.costmodel.models.torch.ragged import Entries, Sparse

_WIDTH = len(LAYOUT_FEATURES)
_CHOICES = DIMENSIONS + 1  # no dimension, or one of six


class LayoutModel(nn.Module):
    """What both share: the names of the two steps."""

    def encode(self, segment: Segment, config: Tensor, references: int) -> Tensor:
        """(K, E) of a segment under K configurations (K, p, 18)."""
        raise NotImplementedError

    def score(self, pooled: Tensor, references: int) -> Tensor:
        """(K,) of the sums over segments."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


class LayoutSAGE(LayoutModel):
    """GraphSAGE with the configuration joined early, and the mean over nodes."""

    def __init__(self, node_width: int, hidden: int = 64, layers: int = 3, op_embed: int = 16) -> None:
        super().__init__()
        self.opcodes = Embedding(N_OPCODES, op_embed)
        self.nodes, self.configs = Dense(node_width + op_embed, hidden), Dense(_WIDTH, hidden)
        self.layers = nn.ModuleList(Dense(2 * hidden, hidden) for _ in range(layers))
        self.head = Stack(hidden, (hidden, 1), "leaky_relu")

    def encode(self, segment: Segment, config: Tensor, references: int) -> Tensor:
        own = self.nodes(torch.cat([self.tensor(segment.node), self.opcodes(self.tensor(segment.opcode))], 1))  # (s, H)
        given = self.configs(config.float() / DIMENSIONS).transpose(0, 1)  # (p, K, H)
        x = own[:, None].expand(-1, len(config), -1).index_add(0, self.tensor(segment.places), given)
        x = functional.leaky_relu(x, 0.2)
        matrix = _neighbours(segment, str(self.device))
        for layer in self.layers:
            x = sage(x, layer, matrix, "leaky_relu")  # type: ignore[arg-type]
        return x.sum(0) / segment.graph_nodes

    def score(self, pooled: Tensor, references: int) -> Tensor:
        return self.head(pooled)[:, 0]


class LayoutAttention(LayoutModel):
    """Directed messages, residual layers, and attention between configurations."""

    def __init__(
        self,
        node_width: int,
        hidden: int = 48,
        layers: int = 3,
        op_embed: int = 16,
        heads: int = 4,
        attention: bool = True,
    ) -> None:
        super().__init__()
        self.opcodes = Embedding(N_OPCODES, op_embed)
        self.nodes = Stack(node_width + op_embed, (hidden, hidden), "gelu")
        self.configs = Stack(_WIDTH * _CHOICES + DIMENSIONS, (hidden, hidden), "gelu")
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.layers = nn.ModuleList(Stack(3 * hidden, (hidden, hidden), "gelu") for _ in range(layers))
        self.attend = nn.ModuleList(Compare(hidden, heads) for _ in range(layers)) if attention else None
        self.last = Compare(2 * hidden, heads) if attention else None
        self.head = Stack(2 * hidden, (hidden, 1), "gelu")

    def encode(self, segment: Segment, config: Tensor, references: int) -> Tensor:
        own = self.nodes(torch.cat([self.tensor(segment.node), self.opcodes(self.tensor(segment.opcode))], 1))  # (s, H)
        places = self.tensor(segment.places)
        given = self.configs(_described(config, self.tensor(segment.sizes))).transpose(0, 1)  # (p, K, H)
        x = own[:, None].expand(-1, len(config), -1).index_add(0, places, given)  # (s, K, H)
        producers, consumers = _directed(segment, str(self.device))
        for depth, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            y = norm(x)
            x = x + layer(torch.cat([y, producers @ y, consumers @ y], -1))
            if self.attend is not None and len(places):
                x = x.index_add(0, places, self.attend[depth](x[places], references))
        share = self.tensor(segment.share)
        return torch.cat([x.sum(0) / segment.graph_nodes, torch.einsum("s,skh->kh", share, x)], 1)  # (K, 2H)

    def score(self, pooled: Tensor, references: int) -> Tensor:
        if self.last is not None:
            pooled = pooled + self.last(pooled[None], references)[0]
        return self.head(pooled)[:, 0]


class Compare(Layer):
    """What attention between the configurations of one place adds to (places, K, H)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not share {width} numbers evenly")
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (Dense(width, width) for _ in range(3))
        self.out = Dense(width, width)

    def forward(self, x: Tensor, references: int) -> Tensor:
        y = self.norm(x)
        shown = y[:, :references]
        q, k, v = (self._split(part) for part in (self.queries(y), self.keys(shown), self.values(shown)))
        seen = functional.scaled_dot_product_attention(q, k, v)  # (places, heads, K, H / heads)
        # A configuration is told how it differs from what it has seen.
        return self.out(self.values(y) - seen.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def _described(config: Tensor, sizes: Tensor) -> Tensor:
    """(K, p, 126 + 6): each layout number as a category, and the logarithms of the sizes in the output's order."""
    choice = config.long().clamp(-1, DIMENSIONS - 1)
    categories = functional.one_hot(choice + 1, _CHOICES).flatten(2).float()
    output = choice[:, :, :DIMENSIONS]
    ordered = sizes.expand(len(config), -1, -1).gather(2, output.clamp_min(0)) * (output >= 0)
    return torch.cat([categories, ordered / 8.0], 2)


def _neighbours(segment: Segment, device: str) -> Sparse:
    u, v = segment.edges.T
    rows, columns = np.concatenate([u, v]), np.concatenate([v, u])
    count = np.array([len(segment.node)])
    matrix = Entries(rows, columns, np.ones(len(rows)), count, count).matrix(device)
    return Sparse(matrix, matrix)


def _directed(segment: Segment, device: str) -> tuple[Sparse, Sparse]:
    """The mean over a node's producers, and over its consumers."""
    consumer, producer = segment.edges.T
    return _means(consumer, producer, segment, device), _means(producer, consumer, segment, device)


def _means(rows: Any, columns: Any, segment: Segment, device: str) -> Sparse:
    count = np.array([len(segment.node)])
    values = 1.0 / np.maximum(np.bincount(rows, minlength=len(segment.node)), 1)[rows]
    return Entries(rows, columns, values, count, count).sparse(device)


MODELS: dict[str, type[LayoutModel]] = {"LayoutSAGE": LayoutSAGE, "LayoutAttention": LayoutAttention}
