"""Layers: linear, convolution, norms, pooling, activations, losses.

Parameter names, layouts and initial distributions are PyTorch's; random numbers come from the generator (or seed)
passed as `rng`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn.module import Buffer, FusibleLayer, Module, Parameter
from tilewise.tensor import Tensor, TensorLike, is_grad_enabled

if TYPE_CHECKING:
    from tilewise.nn.functional import Pair, Size

Rng: TypeAlias = "np.random.Generator | int | None"  # a string, so that numpy.random is imported only on first use


def uniform(rng: Rng, shape: tuple[int, ...], bound: float) -> Parameter:
    """Create a parameter with uniform random numbers in [-bound, bound)."""
    values = np.random.default_rng(rng).random(shape, dtype=np.float32)
    values -= np.float32(0.5)
    values *= np.float32(2 * bound)
    return Parameter(values)


def _bound(fan_in: int) -> float:
    return 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0


class Linear(FusibleLayer):
    """Linear layer y = x @ weight.T + bias with weight (out, in)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, rng: Rng = None) -> None:
        """Draw weight and bias uniformly in ±1/sqrt(in_features), as PyTorch does."""
        rng = np.random.default_rng(rng)
        self.in_features, self.out_features = in_features, out_features
        self.weight = uniform(rng, (out_features, in_features), _bound(in_features))
        self.bias = uniform(rng, (out_features,), _bound(in_features)) if bias else None

    def forward(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias, activation=activation, residual=residual)

    def forward_fused(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        activation = fusable_activation(layers[1:2])
        return self(x, activation=activation), 2 if activation else 1


class Conv2d(FusibleLayer):
    """Convolution over (N, C, H, W) with weight (out, in/groups, kh, kw).

    `padding` is one number, (rows, columns), (top, left, bottom, right), or "same", which keeps the size of the image.
    """

    dilation: Pair = (1, 1)
    padding: tuple[int, ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: int | tuple[int, ...] | Literal["same", "valid"] = 0,
        groups: int = 1,
        bias: bool = True,
        rng: Rng = None,
        dilation: Size = 1,
    ) -> None:
        """Check the groups and draw the initial weights."""
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ShapeError(f"{in_channels} and {out_channels} channels cannot be divided into {groups} groups")
        rng = np.random.default_rng(rng)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = map(nn.functional.pair, (kernel_size, stride, dilation))
        self.padding = self._named_padding(padding) if isinstance(padding, str) else nn.functional.sides(padding)
        bound = _bound(in_channels // groups * self.kernel_size[0] * self.kernel_size[1])
        self.weight = uniform(rng, (out_channels, in_channels // groups, *self.kernel_size), bound)
        self.bias = uniform(rng, (out_channels,), bound) if bias else None

    def _named_padding(self, name: str) -> tuple[int, ...]:
        """Return the padding that PyTorch calls "same" or "valid"."""
        rows, columns = (d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))
        paddings = {"valid": (0, 0), "same": (rows // 2, columns // 2, rows - rows // 2, columns - columns // 2)}
        if name not in paddings or (any(paddings[name]) and self.stride != (1, 1)):
            raise ConfigurationError(f'padding is numbers, "valid", or "same" with a stride of 1; not {name!r}')
        return nn.functional.sides(paddings[name])

    def forward(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        return self.convolve(x, self.weight, self.bias, activation, residual)

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None = None
    ) -> Tensor:
        """Convolve with other weights but this layer's stride, padding, groups and dilation."""
        return nn.functional.conv2d(
            x,
            weight,
            bias,
            stride=self.stride,
            padding=self.padding,
            groups=self.groups,
            dilation=self.dilation,
            activation=activation,
            residual=residual,
        )

    @property
    def is_even(self) -> bool:
        """Whether padding is symmetric and there is no dilation, as integer and sparse kernels require."""
        return len(self.padding) == 2 and self.dilation == (1, 1)

    def forward_fused(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        """Run this convolution fused with the batch norm or activation after it.

        Return (result, number of layers run).
        """
        norm = layers[1] if len(layers) > 1 else None
        if isinstance(norm, BatchNorm2d) and not norm.training and not is_grad_enabled():
            activation = fusable_activation(layers[2:3])
            weight, bias = fold_batch_norm(self, norm)
            return self.convolve(x, weight, bias, activation), 3 if activation else 2
        activation = fusable_activation(layers[1:2])
        return self(x, activation=activation), 2 if activation else 1


def fusable_activation(next_layers: list[Module]) -> str | None:
    """Return the name of the next layer's activation if it can be fused: ReLU, or GELU without gradients."""
    kind = type(next_layers[0]) if next_layers else None
    if kind is ReLU:
        return "relu"
    return "gelu" if kind is GELU and not is_grad_enabled() else None


def fold_batch_norm(conv: Conv2d, norm: BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution equivalent to `conv` followed by `norm` in eval mode."""
    # norm(conv(x)) = scale · (w * x + b) + shift: scale the weight and the bias, and add the shift.
    scale = norm.weight._array / np.sqrt(norm.running_var._array + np.float32(norm.eps))
    shift = norm.bias._array - norm.running_mean._array * scale
    bias = shift if conv.bias is None else shift + conv.bias._array * scale
    return Tensor(conv.weight._array * scale[:, None, None, None]), Tensor(bias)


class BatchNorm2d(Module):
    """Batch normalisation (Ioffe and Szegedy 2015) over (N, C, H, W), with running statistics for `eval`."""

    depends_on_mode = True

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        """Create scale 1, shift 0, running mean 0 and running variance 1 per channel."""
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = Parameter(np.ones(num_features, np.float32))
        self.bias = Parameter(np.zeros(num_features, np.float32))
        self.running_mean = Buffer(np.zeros(num_features, np.float32))
        self.running_var = Buffer(np.ones(num_features, np.float32))
        self.num_batches_tracked = Buffer(np.zeros((), np.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the batch's statistics in training, by the running ones in eval mode."""
        if x.ndim != 4:
            raise ShapeError(f"BatchNorm2d takes (N, C, H, W), not {x.shape}")
        if self.training:
            self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )


class LayerNorm(Module):
    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5) -> None:
        """Create scale 1 and shift 0 of the normalized shape."""
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps = shape, eps
        self.weight = Parameter(np.ones(shape, np.float32))
        self.bias = Parameter(np.zeros(shape, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(Module):
    takes_arrays = True

    def __init__(self, num_embeddings: int, embedding_dim: int, rng: Rng = None) -> None:
        """Draw the table (num_embeddings, embedding_dim) from a standard normal distribution."""
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        values: npt.NDArray[np.float32] = np.random.default_rng(rng).standard_normal(
            (num_embeddings, embedding_dim), dtype=np.float32
        )
        self.weight = Parameter(values)

    def forward(self, ids: TensorLike) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class MaxPool2d(Module):
    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        self.kernel_size = nn.functional.pair(kernel_size)
        self.stride = self.kernel_size if stride is None else nn.functional.pair(stride)
        self.padding = nn.functional.pair(padding)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2d(MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class GlobalAvgPool(Module):
    """Mean of each channel: (N, C, H, W) to (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.global_avg_pool(x)


class Flatten(Module):
    """Flatten all axes but the first: (N, ...) to (N, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class GELU(Module):
    """Exact GELU, x Φ(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.gelu()


class Softmax(Module):
    """Softmax along `dim`."""

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(self.dim)


class CrossEntropyLoss(Module):
    """`functional.cross_entropy` as a layer."""

    def __init__(self, reduction: str = "mean", ignore_index: int = -100) -> None:
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, logits: Tensor, targets: TensorLike) -> Tensor:
        return nn.functional.cross_entropy(logits, targets, self.reduction, self.ignore_index)


class MSELoss(Module):
    """`functional.mse_loss` as a layer."""

    def forward(self, x: Tensor, y: TensorLike) -> Tensor:
        return nn.functional.mse_loss(x, y)


class Dropout(Module):
    """Zeroes elements with probability `p` while training, with its own random generator."""

    depends_on_mode = True

    def __init__(self, p: float = 0.5, rng: Rng = None) -> None:
        if not 0 <= p <= 1:
            raise ConfigurationError(f"the probability of dropping an element is between 0 and 1, not {p}")
        self.p, self.rng = p, np.random.default_rng(rng)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, self.training, self.rng)
