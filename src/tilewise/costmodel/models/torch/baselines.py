"""The five baselines of TpuGraphs (Phothilimthana et al. 2023): MLP, and early- and late-join GraphSAGE and ResGCN.

An early join concatenates a configuration's features to every node before the layers. Before its activation the first
layer is linear, so it is applied to nodes and configurations separately and added: (nodes + configurations) rows of
work instead of (nodes x configurations). Only later layers compute all pairs. Arguments and defaults are those of the
originals; the inputs of a joined layer are node features, opcode embedding, configuration, in that order.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.costmodel.data.schema import N_OPCODES
from tilewise.costmodel.models.torch.fused import available, early_join_sage, supports
from tilewise.costmodel.models.torch.layers import Dense, OpcodeEmbedding, Stack, activation, l2_normalize, sage
from tilewise.costmodel.models.torch.ragged import KernelBatch
from tilewise.errors import ConfigurationError

REGULARISATION = 1e-4  # L2 penalty of the published baselines


class Baseline(nn.Module):
    """Common parts of the five baselines: opcode embedding, node inputs, regularisation."""

    preparation = "minmax"

    def __init__(self, op_embed_dim: int) -> None:
        super().__init__()
        self.embedding = OpcodeEmbedding(N_OPCODES, op_embed_dim)

    def node_inputs(self, batch: KernelBatch) -> Tensor:
        """Return node features joined with opcode embeddings, (N, F + E)."""
        return torch.cat([batch.node, self.embedding(batch.opcode)], dim=-1)

    def penalty(self, batch: KernelBatch) -> Tensor:
        """Return the regularization loss: L2 of the dense weights and mean squared embeddings of the nodes."""
        kernels = [layer.kernel for layer in self.modules() if isinstance(layer, Dense)]
        # The share of the batch's nodes that have each opcode; torch.bincount takes 0.25 ms, much more than NumPy.
        opcodes = np.concatenate([inputs.opcode for inputs in batch.inputs])
        share = torch.from_numpy(np.bincount(opcodes, minlength=N_OPCODES) / len(opcodes)).to(self.embedding.table)
        squares = torch.stack([kernel.square().sum() for kernel in kernels]).sum()
        return REGULARISATION * (squares + share @ self.embedding.table.square().sum(-1))


def reduce_nodes(x: Tensor, batch: KernelBatch, reduction: str) -> Tensor:
    """Pool node values (N, ...) to one per kernel (K, ...) by `reduction`: "sum", "mean" or "max"."""
    if reduction == "max":
        # A maximum is not linear, so it cannot be a matrix product.
        index = batch.kernel_of_node.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        start = x.new_zeros((len(batch.node_counts), *x.shape[1:]))
        return start.scatter_reduce(0, index, x, "amax", include_self=False)
    total = batch.pooling @ x
    if reduction == "sum":
        return total
    if reduction == "mean":
        counts = torch.as_tensor(batch.node_counts, dtype=x.dtype, device=x.device)
        return total / counts.view(-1, *[1] * (x.dim() - 1))
    raise ConfigurationError(f"There is no reduction {reduction!r}; use sum, mean or max.")


def join_after_pooling(pooled: Tensor, batch: KernelBatch, head: Stack) -> Tensor:
    """Apply `head` to each pooled graph (K, P) joined with each of its configurations: (K, C).

    The head's first layer is applied to the two separately, which avoids the joined tensor.
    """
    # [pooled, config] @ kernel, computed once per kernel and once per configuration.
    layer, width = head.layers[0], pooled.shape[-1]
    assert isinstance(layer, Dense)
    first = (pooled @ layer.kernel[:width] + layer.bias)[:, None] + batch.config @ layer.kernel[width:]
    return head(first, first=first).squeeze(-1)


class MLP(Baseline):
    """Sums of node features and opcode embeddings, joined with the configuration."""

    def __init__(
        self,
        node_width: int,
        config_width: int,
        op_embed_dim: int = 32,
        mlp_layers: int = 2,
        hidden_activation: str = "leaky_relu",
        hidden_dim: int = 64,
        reduction: str = "sum",
    ) -> None:
        """Build the opcode embedding and the dense layers."""
        super().__init__(op_embed_dim)
        self.reduction = reduction
        inputs = node_width + op_embed_dim + config_width
        self.head = Stack(inputs, [hidden_dim] * mlp_layers + [1], hidden_activation)

    def forward(self, batch: KernelBatch) -> Tensor:
        pooled = reduce_nodes(self.node_inputs(batch), batch, self.reduction)
        return join_after_pooling(pooled, batch, self.head)


class _SageBaseline(Baseline):
    """GraphSAGE layers (Hamilton et al. 2017) and a head; subclasses set where configurations are joined."""

    early: bool

    def __init__(
        self,
        node_width: int,
        config_width: int,
        num_gnns: int = 3,
        final_mlp_layers: int = 2,
        hidden_activation: str = "leaky_relu",
        hidden_dim: int = 64,
        op_embed_dim: int = 64,
    ) -> None:
        """Build the opcode embedding, `num_gnns` GraphSAGE layers and the head."""
        super().__init__(op_embed_dim)
        self.hidden_activation = hidden_activation
        inputs = node_width + op_embed_dim + (config_width if self.early else 0)
        widths = [inputs] + [hidden_dim] * num_gnns
        self.gnn = nn.ModuleList(Dense(2 * a, b) for a, b in pairwise(widths))
        pooled = widths[-1] + (0 if self.early else config_width)
        self.head = Stack(pooled, [hidden_dim] * final_mlp_layers + [1], hidden_activation)

    def _gnn_layer(self, depth: int) -> Dense:
        """Return the dense layer of the GNN at this depth, typed."""
        layer = self.gnn[depth]
        assert isinstance(layer, Dense)
        return layer


class LateJoinSAGE(_SageBaseline):
    """GraphSAGE over the nodes; configurations are joined to the pooled graph."""

    early = False

    def forward(self, batch: KernelBatch) -> Tensor:
        """Score the batch: GraphSAGE over nodes, pooling per kernel, then a head for pooled graph and configuration."""
        x, adjacency = self.node_inputs(batch), batch.neighbours
        for depth in range(len(self.gnn)):
            x = sage(x, self._gnn_layer(depth), adjacency, self.hidden_activation)
        return join_after_pooling(batch.pooling @ x, batch, self.head)


class EarlyJoinSAGE(_SageBaseline):
    """GraphSAGE over the nodes, each joined with the configuration."""

    early = True

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernels support this network on a CPU."""
        return len(self.gnn) > 0 and available(self.hidden_activation)

    def forward(self, batch: KernelBatch) -> Tensor:
        """Score by the compiled kernels on a CPU, by torch elsewhere; without layers, nodes are only summed."""
        if self.compiled and supports(batch.node):
            return early_join_sage(batch, self._kernel_tensors(), len(self.gnn))
        nodes, adjacency = self.node_inputs(batch), batch.neighbours
        if not len(self.gnn):
            pooled = (batch.pooling @ nodes)[:, None].expand(-1, batch.config.shape[1], -1)
            # Without layers, every node contributes the configuration once.
            counts = torch.as_tensor(batch.node_counts, device=nodes.device)[:, None, None]
            return torch.Tensor(self.head(torch.cat([pooled, counts * batch.config], dim=-1)).squeeze(-1))
        x = self._first_layer(nodes, batch)
        for depth in range(1, len(self.gnn)):
            x = sage(x, self._gnn_layer(depth), adjacency, self.hidden_activation)
        return self.head(batch.pooling @ x).squeeze(-1)

    def _kernel_tensors(self) -> list[Tensor]:
        """List the tensors in the compiled kernels' order: opcode table, then kernel and bias of every layer."""
        layers = [layer for layer in (*self.gnn, *self.head.layers) if isinstance(layer, Dense)]
        return [self.embedding.table, *(tensor for layer in layers for tensor in (layer.kernel, layer.bias))]

    def _first_layer(self, nodes: Tensor, batch: KernelBatch) -> Tensor:
        """Compute the first layer for all pairs of node and configuration, (N, C, H), from separate products for each.

        The sum over neighbours of a configuration's term is the node's degree times that term.
        """
        layer, width = self._gnn_layer(0), nodes.shape[-1]
        config_width = batch.config.shape[-1]
        # The kernel has a part for each of [neighbours, itself] x [node, configuration].
        near_node, near_config, own_node, own_config = torch.split(
            layer.kernel, [width, config_width, width, config_width]
        )
        from_node = (batch.neighbours @ nodes) @ near_node + nodes @ own_node + layer.bias  # (N, H)
        own, near = (
            (batch.config @ own_config)[batch.kernel_of_node],
            (batch.config @ near_config)[batch.kernel_of_node],
        )
        z = from_node[:, None] + own + batch.degree[:, None, None] * near  # (N, C, H)
        return l2_normalize(activation(self.hidden_activation)(z))


class _ResGCNBaseline(Baseline):
    """Residual graph convolutions (Kipf and Welling 2017) and a head; subclasses set where configurations join."""

    early: bool

    def __init__(
        self,
        node_width: int,
        config_width: int,
        num_gnns: int = 3,
        mlp_layers: int = 2,
        hidden_activation: str = "leaky_relu",
        hidden_dim: int = 64,
        op_embed_dim: int = 32,
        directed: bool = False,
        reduction: str = "sum",
    ) -> None:
        """Build the layers; a directed network has separate weights for both directions and the node itself."""
        super().__init__(op_embed_dim)
        self.activation, self.directed, self.reduction = activation(hidden_activation), directed, reduction
        inputs = node_width + op_embed_dim + (config_width if self.early else 0)
        self.prenet = Stack(inputs, [hidden_dim] * 2, hidden_activation)
        # Directed networks have separate layers for producers, consumers and the node itself.
        per_layer = 3 if directed else 1
        self.gnn = nn.ModuleList(
            Stack(hidden_dim, [hidden_dim] * mlp_layers, hidden_activation) for _ in range(num_gnns * per_layer)
        )
        self.head = Stack(hidden_dim + (0 if self.early else config_width), [hidden_dim, 1], hidden_activation)

    def convolve(self, x: Tensor, batch: KernelBatch) -> Tensor:
        """Apply the residual graph convolutions and pool over the nodes."""
        for depth in range(0, len(self.gnn), 3 if self.directed else 1):
            y = self.activation(x)
            if self.directed:
                outward, inward = batch.normalized_adjacency
                terms = (outward @ y, inward @ y, y)
                x = x + torch.stack([self.gnn[depth + i](term) for i, term in enumerate(terms)]).sum(0)
            else:
                x = x + self.gnn[depth](batch.gcn_matrix @ y)
        return reduce_nodes(self.activation(x), batch, self.reduction)


class LateJoinResGCN(_ResGCNBaseline):
    """Residual GCN over the nodes; configurations are joined to the pooled graph."""

    early = False

    def forward(self, batch: KernelBatch) -> Tensor:
        pooled = self.convolve(self.prenet(self.node_inputs(batch)), batch)
        return join_after_pooling(pooled, batch, self.head)


class EarlyJoinResGCN(_ResGCNBaseline):
    """Residual GCN over the nodes, each joined with the configuration."""

    early = True

    def forward(self, batch: KernelBatch) -> Tensor:
        """Score the batch: each node sees the configuration from the first layer on, then residual GCN and a head."""
        nodes, layer = self.node_inputs(batch), self.prenet.layers[0]
        assert isinstance(layer, Dense)
        width = nodes.shape[-1]
        # The first layer of the pre-network, for nodes and configurations separately.
        first = (nodes @ layer.kernel[:width] + layer.bias)[:, None] + (batch.config @ layer.kernel[width:])[
            batch.kernel_of_node
        ]
        return self.head(self.convolve(self.prenet(first, first=first), batch)).squeeze(-1)
