"""Dense layers as the baselines define them, and the fused GraphSAGE layer.

`Dense` stores its kernel as (inputs, outputs) with Keras's initialization, so that weights move to Keras unchanged.
`sage` is one autograd node per layer with a hand-written backward pass: one matrix product each for the result, the
kernel's gradient and the input's gradient, and it saves only what these need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.costmodel.models.torch.ragged import Matrix, SparseMatrix, product
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
    """Return the activation function called `name`."""
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


class _SageFunction(torch.autograd.Function):
    """l2_normalize(leaky_relu([S x, x] @ kernel + bias)) for a symmetric S, over the last axis of (N, ..., H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor, matrix: Matrix) -> Tensor:
        width = x.shape[-1]
        own, neighbours = x.reshape(-1, width), product(matrix, x).view(-1, width)
        # Two products into one buffer instead of a concatenation.
        z = torch.addmm(bias, own, kernel[width:]).addmm_(neighbours, kernel[:width])
        y, norm = _activate_and_normalize(z)
        ctx.save_for_backward(own, neighbours, kernel, y, norm)
        ctx.matrix, ctx.shape = matrix, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        """Compute the gradients of x, kernel and bias; S is symmetric, so its transpose is S itself."""
        own, neighbours, kernel, y, norm = ctx.saved_tensors
        dz, width = _activation_and_norm_grad(grads[0], y, norm), own.shape[1]
        # Both halves of the kernel's gradient are written in place.
        dkernel = torch.empty_like(kernel)
        torch.mm(neighbours.t(), dz, out=dkernel[:width])
        torch.mm(own.t(), dz, out=dkernel[width:])
        # The first layer reads features, which need no gradient.
        if not ctx.needs_input_grad[0]:
            return None, dkernel, dz.sum(0), None
        dx = product(ctx.matrix, torch.mm(dz, kernel[:width].t()).view(ctx.shape)).view(-1, width)
        return dx.addmm_(dz, kernel[width:].t()).view(ctx.shape), dkernel, dz.sum(0), None


class _JoinFirstFunction(torch.autograd.Function):
    """First layer of an early join: l2_normalize(leaky_relu(nodes[:, None] + to_nodes @ configs))."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, configs: Tensor, to_nodes: Matrix, to_configs: Matrix) -> Tensor:
        z = product(to_nodes, configs)  # (N, C, H)
        # Nodes are added in place: (N, C, H) is the largest array of the network.
        y, norm = _activate_and_normalize(z.add_(nodes[:, None]))
        ctx.save_for_backward(y, norm)
        ctx.to_configs = to_configs
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, norm = ctx.saved_tensors
        dz = _activation_and_norm_grad(grads[0], y, norm).view(y.shape)
        return dz.sum(1), product(ctx.to_configs, dz), None, None


def _activate_and_normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """Apply leaky ReLU and L2 normalization in place; returns the result and the norms."""
    functional.leaky_relu_(z, LEAKY_SLOPE)
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min_(_TINY)
    return z.div_(norm), norm


def _activation_and_norm_grad(dy: Tensor, y: Tensor, norm: Tensor) -> Tensor:
    """Backpropagate through L2 normalization and leaky ReLU; the result y has the sign of the input."""
    dy, y, norm = dy.reshape(-1, y.shape[-1]), y.view(-1, y.shape[-1]), norm.view(-1, 1)
    projection = torch.linalg.vecdot(dy, y).unsqueeze_(1)
    # Gradient of y = z / |z|: (dy - y <dy, y>) / |z|.
    dz = torch.addcmul(dy, y, projection, value=-1.0).div_(norm)
    return torch.ops.aten.leaky_relu_backward(dz, y, LEAKY_SLOPE, True)  # type: ignore[no-any-return]


def join_first(nodes: Tensor, configs: Tensor, to_nodes: SparseMatrix, activation_name: str) -> Tensor:
    """Compute the first layer of EarlyJoinSAGE on (N, C): `nodes` (N, H) plus `to_nodes` @ `configs` (2K, C, H)."""
    if _fused(nodes, activation_name):
        result: Tensor = _JoinFirstFunction.apply(nodes, configs, to_nodes.forward, to_nodes.transposed)  # type: ignore[no-untyped-call]
        return result
    return l2_normalize(activation(activation_name)(nodes[:, None] + to_nodes @ configs))


def _fused(x: Tensor, activation_name: str) -> bool:
    """Tell whether the hand-written backward pass applies."""
    mixed = torch.is_autocast_enabled(x.device.type)
    return activation_name == "leaky_relu" and x.dtype == torch.float32 and not mixed


def sage(x: Tensor, layer: Dense, matrix: SparseMatrix, activation_name: str) -> Tensor:
    """Apply one GraphSAGE layer; `matrix` must be symmetric."""
    if _fused(x, activation_name):
        result: Tensor = _SageFunction.apply(x, layer.kernel, layer.bias, matrix.forward)  # type: ignore[no-untyped-call]
        return result
    return l2_normalize(activation(activation_name)(layer(torch.cat([matrix @ x, x], dim=-1))))
