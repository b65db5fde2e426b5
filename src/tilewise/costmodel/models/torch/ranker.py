"""TileRanker: a network that encodes the graph once and scores every configuration given that encoding.

A small graph network encodes the nodes; pooled and joined with the kernel's sizes they give one vector per kernel. A
configuration's features (see `features.ranker`) pass through a residual network that the kernel's vector modulates
(FiLM, Perez et al. 2018), with one attention layer over the nodes. Several ensemble members share the large matrices
and differ only in input scalings and the last layer (BatchEnsemble, Wen et al. 2020), so the ensemble costs little more
than one network. The score is the members' mean; lower is faster.

Training on a CPU uses compiled kernels (see `ranker_step`), everything else torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise._extension import native
from tilewise.costmodel.data.schema import N_OPCODES
from tilewise.costmodel.models.torch.layers import Dense, OpcodeEmbedding
from tilewise.costmodel.models.torch.ragged import KernelBatch
from tilewise.costmodel.models.torch.ranker_step import learn_ranker
from tilewise.costmodel.training.losses import CombinedLoss

_SMALL = 0.1  # initial scale of the network where a linear term estimates the runtime; insensitive between 0.03 and 0.3


class TileRanker(nn.Module):
    """The ranker; the first `global_width` columns of a configuration describe the kernel."""

    preparation = "ranker"

    def __init__(
        self,
        node_width: int,
        config_width: int,
        global_width: int = 0,
        hidden_dim: int = 96,
        node_dim: int = 32,
        op_embed_dim: int = 16,
        num_gnns: int = 2,
        num_blocks: int = 2,
        members: int = 4,
        dropout: float = 0.05,
        prior_column: int = -1,
        prior_weight: float = 0.0,
    ) -> None:
        """Build the layers; the arguments are recorded in model files."""
        super().__init__()
        self.global_width, self.members, self.dropout = global_width, members, dropout
        own = config_width - global_width
        self.embedding = OpcodeEmbedding(N_OPCODES, op_embed_dim)
        self.node_in = Dense(node_width + op_embed_dim, node_dim)
        self.gnn = nn.ModuleList(Dense(2 * node_dim, node_dim) for _ in range(num_gnns))
        self.kernel_in = Dense(2 * node_dim + global_width, hidden_dim)
        self.config_in = Dense(own, hidden_dim)
        # Random signs make the members different from the start.
        self.scaling = nn.Parameter(torch.where(torch.rand(members, 1, own) < 0.5, -1.0, 1.0))
        self.film = nn.ModuleList(Dense(hidden_dim, 2 * hidden_dim) for _ in range(num_blocks))
        self.blocks = nn.ModuleList(Dense(hidden_dim, hidden_dim) for _ in range(num_blocks))
        self.query, self.key, self.value = (
            Dense(hidden_dim, node_dim),
            Dense(node_dim, node_dim),
            Dense(node_dim, hidden_dim),
        )
        self.out = nn.Parameter(torch.randn(members, hidden_dim, 1) / math.sqrt(hidden_dim))
        # A linear term (wide and deep, Cheng et al. 2016) that starts as an estimate of the log runtime: the network
        # learns its error, so that it is right where few kernels teach anything.
        self.linear: nn.Parameter | None = None
        if prior_column >= 0:
            self.linear = nn.Parameter(torch.zeros(own))
            with torch.no_grad():
                self.linear[prior_column] = prior_weight
                self.out.mul_(_SMALL)

    def encode_nodes(self, batch: KernelBatch) -> Tensor:
        """Run the graph network over the batch's nodes; returns (N, node_dim)."""
        x = functional.relu(self.node_in(torch.cat([batch.node, self.embedding(batch.opcode)], dim=-1)))
        outward, inward = batch.normalized_adjacency
        for layer in self.gnn:
            x = x + functional.relu(layer(torch.cat([outward @ x, inward @ x], dim=-1)))
        return x  # (N, node_dim)

    def encode_kernel(self, nodes: Tensor, batch: KernelBatch) -> Tensor:
        """Pool the nodes per kernel and join them with the kernel-wide inputs; returns (K, H)."""
        # The mean describes the average node; the sum over sqrt(n) also grows with the graph.
        counts = torch.as_tensor(batch.node_counts, dtype=nodes.dtype, device=nodes.device)[:, None]
        total = batch.pooling @ nodes
        kernel_wide = batch.config[:, 0, : self.global_width]
        joined = torch.cat([total / counts, total / counts.sqrt(), kernel_wide], dim=-1)
        return functional.relu(self.kernel_in(self._drop(joined)))  # (K, H)

    def forward(self, batch: KernelBatch) -> Tensor:
        """Return scores (K, C); in training those of each ensemble member, (K, members, C)."""
        nodes = self.encode_nodes(batch)
        kernel = self.encode_kernel(nodes, batch)
        h = self._first_layer(batch.config[..., self.global_width :], kernel)  # (K, C * members, H)
        h = self._attend(h, nodes, batch)
        # Residual blocks modulated by the kernel's vector.
        for film, block in zip(self.film, self.blocks, strict=True):
            weight, bias = self._folded_block(block, film(kernel))
            h = h + functional.relu_(torch.baddbmm(bias[:, None], h, weight))
        scores = h.view(*batch.config.shape[:2], -1) @ self._last_layers()  # (K, C, members)
        if self.linear is not None:
            scores = scores + (batch.config[..., self.global_width :] * self.linear).sum(-1, keepdim=True)
        return scores.transpose(1, 2) if self.training else scores.mean(-1)

    @property
    def compiled(self) -> bool:
        """Whether `learn` may replace `forward` and backward; not if a subclass overrides `forward`."""
        return native is not None and type(self) is TileRanker

    def learn(self, batch: KernelBatch, loss: CombinedLoss) -> tuple[float, Tensor]:
        """Run forward and backward by compiled kernels: add the gradient to the parameters', return (loss, scores)."""
        return learn_ranker(self, batch, loss, self.dropout)

    def _last_layers(self) -> Tensor:
        """Arrange the members' last layers as one block-diagonal matrix (members * H, members)."""
        identity = torch.eye(self.members, dtype=self.out.dtype, device=self.out.device)
        return (self.out * identity[:, None]).flatten(0, 1)

    def _first_kernels(self) -> Tensor:
        """Stack the members' first layers: (D, members * H). Members scale the rows of one kernel."""
        return (self.scaling.transpose(1, 2) * self.config_in.kernel).permute(1, 0, 2).flatten(1)

    def _first_layer(self, own: Tensor, kernel: Tensor) -> Tensor:
        """Apply every member's first layer: (K, C * members, H).

        `own` (K, C, D) are configurations, `kernel` (K, H) the kernels' encodings.
        """
        width = self.config_in.kernel.shape[1]
        z = own.flatten(0, 1) @ self._first_kernels()
        return functional.relu_(z.view(len(own), -1, width) + (kernel + self.config_in.bias)[:, None])

    @staticmethod
    def _folded_block(block: nn.Module, film: Tensor) -> tuple[Tensor, Tensor]:
        """Fold FiLM into a block, (h W + b) * scale + shift: weight (K, H, H) and bias (K, H)."""
        assert isinstance(block, Dense)
        scale, shift = film.chunk(2, dim=-1)
        scale = 1 + scale
        return block.kernel * scale[:, None], torch.addcmul(shift, block.bias, scale)

    def _attend(self, h: Tensor, nodes: Tensor, batch: KernelBatch) -> Tensor:
        """Return h plus attention from each configuration's row to its kernel's nodes.

        Queries are folded into the keys.
        """
        # Kernels have different numbers of nodes: pad, and mask the padding with -inf.
        keys, values = (batch.pad_nodes(layer(nodes)) for layer in (self.key, self.value))
        keys = keys.transpose(-1, -2) / math.sqrt(keys.shape[-1])  # (K, node_dim, n)
        bias = (self.query.bias @ keys).masked_fill(~batch.node_slots, -torch.inf)
        weights = torch.baddbmm(bias[:, None], h, self.query.kernel @ keys).softmax(-1)
        return torch.baddbmm(h, weights, values)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)
