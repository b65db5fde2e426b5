"""Dense layers as the baselines define them, and the fused GraphSAGE layer.

`Dense` keeps its kernel as (inputs, outputs) with Keras's initial values, so that weights move to Keras unchanged.
`sage` is one autograd node per layer with the backward pass written out: one matrix product each for the result, the
kernel's gradient and the input's gradient, and no intermediate kept beyond what those need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.costmodel.models.torch.ragged import Matrix, Sparse, product
from tilewise.errors import ConfigurationError

LEAKY_SLOPE = 0.2
_TINY = 1e-6

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
    if name not in ACTIVATIONS:
        raise ConfigurationError(f"There is no activation {name!r}; use one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


class Layer(nn.Module):
    """A module whose call is typed."""

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Dense(Layer):
    """x @ kernel + bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        limit = math.sqrt(6.0 / max(1, inputs + outputs))
        self.kernel = nn.Parameter(torch.empty(inputs, outputs).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.kernel.t(), self.bias)


class Stack(Layer):
    """Dense layers with the activation between them, and none after the last."""

    def __init__(self, inputs: int, widths: Sequence[int], activation_name: str) -> None:
        super().__init__()
        sizes = [inputs, *widths]
        self.layers = nn.ModuleList(Dense(a, b) for a, b in pairwise(sizes))
        self.activation = activation(activation_name)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """`first`, where given, is the first layer's result, worked out by the caller from its parts."""
        for depth, layer in enumerate(self.layers):
            x = first if depth == 0 and first is not None else layer(x if depth == 0 else self.activation(x))
        return x


class Embedding(Layer):
    """One learned row per opcode, always for the whole opcode table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width).uniform_(-0.05, 0.05))

    def forward(self, index: Tensor) -> Tensor:
        return functional.embedding(index, self.table)


def l2_normalize(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_min(_TINY)


class _Sage(torch.autograd.Function):
    """l2_normalize(leaky_relu([S x, x] @ kernel + bias)) for a symmetric S, over the last axis of (N, ..., H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor, matrix: Matrix) -> Tensor:
        width = x.shape[-1]
        own, near = x.reshape(-1, width), product(matrix, x).view(-1, width)
        z = torch.addmm(bias, own, kernel[width:]).addmm_(near, kernel[:width])
        y, norm = _activate_and_normalize(z)
        ctx.save_for_backward(own, near, kernel, y, norm)
        ctx.matrix, ctx.shape = matrix, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        own, near, kernel, y, norm = ctx.saved_tensors
        dz, width = _through_both(grads[0], y, norm), own.shape[1]
        dkernel = torch.empty_like(kernel)
        torch.mm(near.t(), dz, out=dkernel[:width])
        torch.mm(own.t(), dz, out=dkernel[width:])
        if not ctx.needs_input_grad[0]:
            return None, dkernel, dz.sum(0), None
        dx = product(ctx.matrix, torch.mm(dz, kernel[:width].t()).view(ctx.shape)).view(-1, width)
        return dx.addmm_(dz, kernel[width:].t()).view(ctx.shape), dkernel, dz.sum(0), None


class _JoinFirst(torch.autograd.Function):
    """l2_normalize(leaky_relu(nodes[:, None] + spread @ configs)): layer one of an early join, from its two parts."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, configs: Tensor, spread: Matrix, gather: Matrix) -> Tensor:
        z = product(spread, configs)  # (N, C, H)
        y, norm = _activate_and_normalize(z.add_(nodes[:, None]))
        ctx.save_for_backward(y, norm)
        ctx.gather = gather
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, norm = ctx.saved_tensors
        dz = _through_both(grads[0], y, norm).view(y.shape)
        return dz.sum(1), product(ctx.gather, dz), None, None


def _activate_and_normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """In place; gives the result and the norms."""
    functional.leaky_relu_(z, LEAKY_SLOPE)
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min_(_TINY)
    return z.div_(norm), norm


def _through_both(dy: Tensor, y: Tensor, norm: Tensor) -> Tensor:
    """Back through l2_normalize and leaky ReLU, both told from the result: y has the sign the input had."""
    dy, y, norm = dy.reshape(-1, y.shape[-1]), y.view(-1, y.shape[-1]), norm.view(-1, 1)
    along = torch.linalg.vecdot(dy, y).unsqueeze_(1)
    dz = torch.addcmul(dy, y, along, value=-1.0).div_(norm)
    return torch.ops.aten.leaky_relu_backward(dz, y, LEAKY_SLOPE, True)  # type: ignore[no-any-return]


def join_first(nodes: Tensor, configs: Tensor, spread: Sparse, activation_name: str) -> Tensor:
    """Layer one of an early-join GraphSAGE on (N, C): `nodes` (N, H) plus `spread` times `configs` (2K, C, H)."""
    if _fused(nodes, activation_name):
        result: Tensor = _JoinFirst.apply(nodes, configs, spread.forward, spread.transposed)  # type: ignore[no-untyped-call]
        return result
    return l2_normalize(activation(activation_name)(nodes[:, None] + spread @ configs))


def _fused(x: Tensor, activation_name: str) -> bool:
    mixed = torch.is_autocast_enabled(x.device.type)
    return activation_name == "leaky_relu" and x.dtype == torch.float32 and not mixed


def sage(x: Tensor, layer: Dense, matrix: Sparse, activation_name: str) -> Tensor:
    """One GraphSAGE layer; S must be symmetric."""
    if _fused(x, activation_name):
        result: Tensor = _Sage.apply(x, layer.kernel, layer.bias, matrix.forward)  # type: ignore[no-untyped-call]
        return result
    return l2_normalize(activation(activation_name)(layer(torch.cat([matrix @ x, x], dim=-1))))
