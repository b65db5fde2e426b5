"""Dense layers as the baselines define them, and the GraphSAGE layer.

`Dense` stores its kernel as (inputs, outputs) with Keras's initialization, so that weights move to Keras unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.costmodel.models.torch.ragged import SparseMatrix
from tilewise.errors import ConfigurationError

LEAKY_SLOPE = 0.2  # of the published baselines
_TINY = 1e-6  # smallest norm that a row is divided by

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: functional.leaky_relu(x, LEAKY_SLOPE),
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": functional.elu,
    "selu": functional.selu,
    "softplus": functional.softplus,
    "swish": functional.silu,
    "silu": functional.silu,
    "linear": lambda x: x,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function of this name, such as "leaky_relu"."""
    if name not in ACTIVATIONS:
        raise ConfigurationError(f"There is no activation {name!r}; use one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


class Layer(nn.Module):
    """A module with a typed call."""

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Dense(Layer):
    """Affine layer x @ kernel + bias with Glorot-uniform initialization."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Create a kernel (inputs, outputs), Glorot-uniform, and a bias of zeros."""
        super().__init__()
        # Keras's glorot_uniform.
        limit = math.sqrt(6.0 / max(1, inputs + outputs))
        self.kernel = nn.Parameter(torch.empty(inputs, outputs).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.kernel.t(), self.bias)


class Stack(Layer):
    """Dense layers with activations between them and none after the last."""

    def __init__(self, inputs: int, widths: Sequence[int], activation_name: str) -> None:
        """Create dense layers of these widths, with activations in between and none after the last."""
        super().__init__()
        sizes = [inputs, *widths]
        self.layers = nn.ModuleList(Dense(a, b) for a, b in pairwise(sizes))
        self.activation = activation(activation_name)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """Apply the layers; `first` is the first layer's result, if the caller computed it."""
        for depth, layer in enumerate(self.layers):
            x = first if depth == 0 and first is not None else layer(x if depth == 0 else self.activation(x))
        return x


class OpcodeEmbedding(Layer):
    """One learned row per opcode, always for the whole opcode table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width).uniform_(-0.05, 0.05))

    def forward(self, index: Tensor) -> Tensor:
        return functional.embedding(index, self.table)


def l2_normalize(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(_TINY)


def sage(x: Tensor, layer: Dense, matrix: SparseMatrix, activation_name: str) -> Tensor:
    """Apply a GraphSAGE layer to node values (N, ..., H); `matrix` (N, N) sums over neighbours."""
    return l2_normalize(activation(activation_name)(layer(torch.cat([matrix @ x, x], dim=-1))))
