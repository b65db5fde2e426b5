"""The five published baselines: MLP, and GraphSAGE and residual GCN with the configuration joined late or early.

Early means that a configuration's features are joined to every node before the layers. The first layer is linear
before its activation, so it is applied to nodes and configurations apart and added: (nodes + configurations) rows of
work in place of (nodes x configurations). The function is the same, and only later layers see the full product.
Arguments and defaults are those of the originals; the input order of a joined layer is node features, opcode
embedding, configuration.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.costmodel.data.schema import N_OPCODES
from tilewise.costmodel.models.numpy.sage import available
from tilewise.costmodel.models.torch.fused import early_join_sage, learn_early_join_sage, plain
from tilewise.costmodel.models.torch.layers import Dense, Embedding, Stack, activation, join_first, sage
from tilewise.costmodel.models.torch.ragged import Batch
from tilewise.costmodel.train.losses import CombinedLoss
from tilewise.costmodel.train.optimizer import FlatAdam
from tilewise.errors import ConfigurationError

REGULARISATION = 1e-4


class Baseline(nn.Module):
    """What the five share: opcode embedding, node inputs, regularisation."""

    preparation = "minmax"

    def __init__(self, op_embed_dim: int) -> None:
        super().__init__()
        self.embedding = Embedding(N_OPCODES, op_embed_dim)
        self._penalised: Tensor | None = None  # what the flat vector of a training's parameters is multiplied with

    def node_inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(N, F + E), and the looked-up embedding rows."""
        rows = self.embedding(batch.opcode)
        return torch.cat([batch.node, rows], dim=-1), rows

    def penalty(self, batch: Batch) -> Tensor:
        """L2 on dense kernels, and on the embedding the mean over nodes of the squared looked-up rows."""
        kernels = [layer.kernel for layer in self.modules() if isinstance(layer, Dense)]
        table, share = self.embedding.table, self._share(batch)
        squares = [kernel.square().sum() for kernel in kernels]
        return REGULARISATION * (torch.stack(squares).sum() + share @ table.square().sum(-1))

    @torch.no_grad()
    def add_penalty_gradient(self, batch: Batch, optimizer: FlatAdam) -> float:
        """Adds the penalty's gradient to the optimizer's and gives the penalty: a few steps on its flat vectors."""
        if self._penalised is None:
            kernels = {id(layer.kernel) for layer in self.modules() if isinstance(layer, Dense)}
            factors = [torch.full_like(p, float(id(p) in kernels)).view(-1) for p in optimizer.parameters]
            self._penalised = torch.cat(factors).mul_(2 * REGULARISATION)
        table, share = self.embedding.table, self._share(batch)
        change, rows = optimizer.values * self._penalised, table * share[:, None]
        optimizer.grads.add_(change)
        if table.grad is not None:
            table.grad.add_(rows, alpha=2 * REGULARISATION)
        looked_up = torch.dot(rows.view(-1), table.view(-1))
        return 0.5 * float(torch.dot(change, optimizer.values)) + REGULARISATION * float(looked_up)

    def _share(self, batch: Batch) -> Tensor:
        """(opcodes,): the share of nodes that have each."""
        opcodes = np.concatenate([part.opcode for part in batch.parts])
        counts = np.bincount(opcodes, minlength=N_OPCODES)  # torch's own takes a quarter of a millisecond
        return torch.from_numpy(counts / len(opcodes)).to(self.embedding.table)


def reduce_nodes(x: Tensor, batch: Batch, reduction: str) -> Tensor:
    """(N, ...) to (K, ...)."""
    if reduction == "max":
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


def join_after_pooling(pooled: Tensor, batch: Batch, head: Stack) -> Tensor:
    """`head` of [pooled, configuration], its first layer applied to the two parts apart: (K, C)."""
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
        super().__init__(op_embed_dim)
        self.reduction = reduction
        inputs = node_width + op_embed_dim + config_width
        self.head = Stack(inputs, [hidden_dim] * mlp_layers + [1], hidden_activation)

    def forward(self, batch: Batch) -> Tensor:
        pooled = reduce_nodes(self.node_inputs(batch)[0], batch, self.reduction)
        return join_after_pooling(pooled, batch, self.head)


class _Sage(Baseline):
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
        super().__init__(op_embed_dim)
        self.hidden_activation = hidden_activation
        inputs = node_width + op_embed_dim + (config_width if self.early else 0)
        widths = [inputs] + [hidden_dim] * num_gnns
        self.gnn = nn.ModuleList(Dense(2 * a, b) for a, b in pairwise(widths))
        pooled = widths[-1] + (0 if self.early else config_width)
        self.head = Stack(pooled, [hidden_dim] * final_mlp_layers + [1], hidden_activation)

    def _dense(self, depth: int) -> Dense:
        layer = self.gnn[depth]
        assert isinstance(layer, Dense)
        return layer


class LateJoinSAGE(_Sage):
    """GraphSAGE over the nodes; configurations are joined to the pooled graph."""

    early = False

    def forward(self, batch: Batch) -> Tensor:
        x, near = self.node_inputs(batch)[0], batch.neighbours
        for depth in range(len(self.gnn)):
            x = sage(x, self._dense(depth), near, self.hidden_activation)
        return join_after_pooling(batch.pooling @ x, batch, self.head)


class EarlyJoinSAGE(_Sage):
    """GraphSAGE over the nodes, each joined with the configuration."""

    early = True

    @property
    def compiled(self) -> bool:
        """Whether a CPU does the layers by the compiled kernels."""
        return len(self.gnn) > 0 and available(self.hidden_activation)

    def forward(self, batch: Batch) -> Tensor:
        if self.compiled and plain(batch.node):
            return early_join_sage(batch, self._tensors(), len(self.gnn))
        nodes, near = self.node_inputs(batch)[0], batch.neighbours
        if not len(self.gnn):
            pooled = (batch.pooling @ nodes)[:, None].expand(-1, batch.config.shape[1], -1)
            counts = torch.as_tensor(batch.node_counts, device=nodes.device)[:, None, None]
            return torch.Tensor(self.head(torch.cat([pooled, counts * batch.config], dim=-1)).squeeze(-1))
        x = self._first(nodes, batch)
        for depth in range(1, len(self.gnn)):
            x = sage(x, self._dense(depth), near, self.hidden_activation)
        return self.head(batch.pooling @ x).squeeze(-1)

    def learn(self, batch: Batch, loss: CombinedLoss) -> tuple[float, Tensor]:
        """Adds the loss's gradient to the parameters'; gives the loss and the scores. For `compiled` networks only."""
        return learn_early_join_sage(batch, self._tensors(), len(self.gnn), loss)

    def _tensors(self) -> list[Tensor]:
        """As the compiled kernels take them: opcode table, then kernel and bias of every layer."""
        layers = [layer for layer in (*self.gnn, *self.head.layers) if isinstance(layer, Dense)]
        return [self.embedding.table, *(tensor for layer in layers for tensor in (layer.kernel, layer.bias))]

    def _first(self, nodes: Tensor, batch: Batch) -> Tensor:
        """Layer one on (N, C): a node's part, its degree times one part of the configuration, plus the other."""
        layer, width = self._dense(0), nodes.shape[-1]
        config_width = batch.config.shape[-1]
        near_node, near_config, own_node, own_config = torch.split(
            layer.kernel, [width, config_width, width, config_width]
        )
        from_node = (batch.neighbours @ nodes) @ near_node + nodes @ own_node + layer.bias  # (N, H)
        both = (batch.config @ own_config, batch.config @ near_config)
        from_config = torch.stack(both, dim=1).flatten(0, 1)  # (2K, C, H), a kernel's two parts side by side
        return join_first(from_node, from_config, batch.spreading, self.hidden_activation)


class _ResGCN(Baseline):
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
        super().__init__(op_embed_dim)
        self.activation, self.directed, self.reduction = activation(hidden_activation), directed, reduction
        inputs = node_width + op_embed_dim + (config_width if self.early else 0)
        self.prenet = Stack(inputs, [hidden_dim] * 2, hidden_activation)
        per_layer = 3 if directed else 1
        self.gnn = nn.ModuleList(
            Stack(hidden_dim, [hidden_dim] * mlp_layers, hidden_activation) for _ in range(num_gnns * per_layer)
        )
        self.head = Stack(hidden_dim + (0 if self.early else config_width), [hidden_dim, 1], hidden_activation)

    def convolve(self, x: Tensor, batch: Batch) -> Tensor:
        for depth in range(0, len(self.gnn), 3 if self.directed else 1):
            y = self.activation(x)
            if self.directed:
                outward, inward = batch.normalised
                parts = (outward @ y, inward @ y, y)
                x = x + torch.stack([self.gnn[depth + i](part) for i, part in enumerate(parts)]).sum(0)
            else:
                x = x + self.gnn[depth](batch.mixing @ y)
        return reduce_nodes(self.activation(x), batch, self.reduction)


class LateJoinResGCN(_ResGCN):
    """Residual GCN over the nodes; configurations are joined to the pooled graph."""

    early = False

    def forward(self, batch: Batch) -> Tensor:
        pooled = self.convolve(self.prenet(self.node_inputs(batch)[0]), batch)
        return join_after_pooling(pooled, batch, self.head)


class EarlyJoinResGCN(_ResGCN):
    """Residual GCN over the nodes, each joined with the configuration."""

    early = True

    def forward(self, batch: Batch) -> Tensor:
        nodes, layer = self.node_inputs(batch)[0], self.prenet.layers[0]
        assert isinstance(layer, Dense)
        width = nodes.shape[-1]
        first = (nodes @ layer.kernel[:width] + layer.bias)[:, None] + (batch.config @ layer.kernel[width:])[
            batch.kernel_of_node
        ]
        return self.head(self.convolve(self.prenet(first, first=first), batch)).squeeze(-1)
