"""Layers as functions of tensors, under PyTorch's names and with its conventions.

>>> from tilewise import Tensor
>>> cross_entropy(Tensor([[2.0, 0.0]]), [0]).item() < 0.13
True
"""

from __future__ import annotations

import math

import numpy as np

from tilewise import ops
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn import primitives
from tilewise.tensor import Array, Tensor, TensorLike, apply

Pair = tuple[int, int]
Size = int | Pair


def pair(size: Size) -> Pair:
    """Convert one number to a pair of equal numbers; return a pair unchanged."""
    if type(size) is tuple and len(size) == 2:
        return size
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def sides(padding: int | tuple[int, ...]) -> tuple[int, ...]:
    """Normalise padding to (rows, columns), or (top, left, bottom, right) if opposite sides differ."""
    if isinstance(padding, int) or len(padding) != 4:
        return pair(padding)  # type: ignore[arg-type]
    top, left, bottom, right = (int(side) for side in padding)
    return (top, left) if (top, left) == (bottom, right) else (top, left, bottom, right)


def _array(value: TensorLike) -> Array:
    return value._array if isinstance(value, Tensor) else np.asarray(value)


def relu(x: Tensor) -> Tensor:
    return apply(ops.Relu, x)


def gelu(x: Tensor) -> Tensor:
    """Exact GELU, x Φ(x)."""
    return apply(ops.Gelu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Tanh approximation of GELU, used by GPT-2."""
    return x * 0.5 * (((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)).tanh() + 1.0)


def silu(x: Tensor) -> Tensor:
    """SiLU (swish), x · sigmoid(x)."""
    return apply(ops.Silu, x)


def hardswish(x: Tensor) -> Tensor:
    """Hard swish, x · clip(x/6 + 1/2, 0, 1)."""
    return apply(ops.HardSwish, x)


def hardsigmoid(x: Tensor) -> Tensor:
    """Hard sigmoid, clip(x/6 + 1/2, 0, 1)."""
    return apply(ops.HardSigmoid, x)


def relu6(x: Tensor) -> Tensor:
    return apply(ops.Clip, x, low=0.0, high=6.0)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return apply(ops.LeakyRelu, x, slope=negative_slope)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return apply(ops.Elu, x, alpha=alpha)


def softplus(x: Tensor) -> Tensor:
    return apply(ops.Softplus, x)


def erf(x: Tensor) -> Tensor:
    return apply(ops.Erf, x)


def sigmoid(x: Tensor) -> Tensor:
    return apply(ops.Sigmoid, x)


def tanh(x: Tensor) -> Tensor:
    return apply(ops.Tanh, x)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return apply(ops.Softmax, x, axis=axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return apply(ops.Softmax, x, axis=axis, log=True)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute activation(x @ weight.T + bias + residual) in one pass.

    The activation "gelu" and `residual` have no gradient; use them under `no_grad`.
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if activation is None and residual is None:
        return apply(primitives.Linear, *inputs)
    return apply(
        primitives.Linear,
        *inputs,
        activation=activation,
        residual=None if residual is None else residual._array,
    )


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    *,
    dilation: Size = 1,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Convolve (N, C, H, W) with filters (O, C/groups, kh, kw).

    `padding` is one number, (rows, columns), or (top, left, bottom, right). The activation "gelu" and `residual` have
    no gradient; use them under `no_grad`.
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    stride, padding, dilation = pair(stride), sides(padding), pair(dilation)
    if activation is None and residual is None and dilation == (1, 1):
        return apply(primitives.Conv2d, *inputs, stride=stride, padding=padding, groups=groups)
    return apply(
        primitives.Conv2d,
        *inputs,
        stride=stride,
        padding=padding,
        groups=groups,
        dilation=dilation,
        activation=activation,
        residual=None if residual is None else residual._array,
    )


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
) -> Tensor:
    """Apply a transposed convolution to (N, C, H, W) with filters (C, O/groups, kh, kw)."""
    from tilewise.nn import resampling  # late, as below: few networks enlarge images

    inputs = (x, weight) if bias is None else (x, weight, bias)
    geometry = {"stride": pair(stride), "padding": pair(padding), "output_padding": pair(output_padding)}
    return apply(resampling.ConvTranspose2d, *inputs, **geometry, groups=groups)


def interpolate(x: Tensor, scale_factor: float, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """Resize both sides of (N, C, H, W) by `scale_factor`; mode is "nearest" or "bilinear"."""
    from tilewise.nn import resampling

    for axis in (2, 3):
        output_size = resampling.scaled_size(x.shape[axis], scale_factor)
        taps = resampling.image_taps(x.shape[axis], output_size, scale_factor, mode, align_corners)
        x = apply(resampling.Resample, x, taps=taps, axis=axis)
    return x


def max_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    step = kernel_size if stride is None else stride
    return apply(primitives.MaxPool2d, x, kernel=pair(kernel_size), stride=pair(step), padding=pair(padding))


def avg_pool2d(x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> Tensor:
    """Average over windows; padding counts as zeros, PyTorch's default."""
    step = kernel_size if stride is None else stride
    return apply(primitives.AvgPool2d, x, kernel=pair(kernel_size), stride=pair(step), padding=pair(padding))


def global_avg_pool(x: Tensor) -> Tensor:
    """Mean of each channel: (N, C, H, W) to (N, C)."""
    return apply(primitives.GlobalAvgPool, x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return apply(primitives.LayerNorm, x, weight, bias, eps=eps)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise each group of channels over all its pixels; weight and bias are per channel."""
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups or weight.shape != x.shape[1:2] or bias.shape != weight.shape:
        raise ShapeError(f"group norm with {groups} groups and a weight of {weight.shape} cannot take {x.shape}")
    rows = x.reshape(x.shape[0] * groups, math.prod(x.shape[1:]) // groups)
    # Layer norm without scale and shift, because these differ within a group.
    ones, zeros = np.ones(rows.shape[1], x.dtype), np.zeros(rows.shape[1], x.dtype)
    normed = layer_norm(rows, Tensor(ones), Tensor(zeros), eps).reshape(x.shape)
    by_channel = (-1, *(1,) * (x.ndim - 2))
    return normed * weight.reshape(by_channel) + bias.reshape(by_channel)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel, while training with the batch's statistics, which also update the running ones."""
    mean = None if running_mean is None else running_mean._array
    var = None if running_var is None else running_var._array
    if training or mean is None or var is None:
        for statistics in (running_mean, running_var):
            if statistics is not None:
                statistics._expose()  # written in place
        running = {"running_mean": mean, "running_var": var, "momentum": momentum}
        return apply(primitives.BatchNorm, x, weight, bias, eps=eps, **running)
    return apply(primitives.FixedNorm, x, weight, bias, mean=mean, var=var, eps=eps)


def embedding(ids: TensorLike, weight: Tensor) -> Tensor:
    return apply(primitives.Embedding, weight, ids=_array(ids))


def dropout(x: Tensor, p: float = 0.5, training: bool = True, rng: np.random.Generator | int | None = None) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1/(1 - p), while training."""
    if not 0 <= p <= 1:
        raise ConfigurationError(f"the dropout probability must be between 0 and 1, not {p}")
    if not training or p == 0:
        return x
    return apply(primitives.Dropout, x, p=p, rng=np.random.default_rng(rng))


def cross_entropy(logits: Tensor, targets: TensorLike, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
    """Cross entropy -log softmax(logits)[target] of logits (..., C) and targets (...), averaged by default."""
    if reduction not in ("mean", "sum", "none"):
        raise ConfigurationError(f"reduction must be mean, sum or none, not {reduction!r}")
    classes = _array(targets)
    if logits.ndim == 2:
        return apply(primitives.CrossEntropy, logits, targets=classes, reduction=reduction, ignore=ignore_index)
    flat = logits.reshape(int(np.prod(logits.shape[:-1])), logits.shape[-1])
    loss = apply(primitives.CrossEntropy, flat, targets=classes.reshape(-1), reduction=reduction, ignore=ignore_index)
    return loss.reshape(classes.shape) if reduction == "none" else loss


def nll_loss(log_probabilities: Tensor, targets: TensorLike) -> Tensor:
    """Average -log_probabilities[i, target[i]] over the rows."""
    classes = _array(targets)
    target_values: Tensor = log_probabilities[np.arange(len(classes)), classes]
    return -target_values.mean()


def mse_loss(x: Tensor, y: TensorLike) -> Tensor:
    """Mean of the squared differences. Shapes must be equal: (N, 1) and (N,) would broadcast to (N, N)."""
    difference: Tensor = x - y
    if x.shape != np.shape(y):
        raise ShapeError(f"the mean squared error needs tensors of one shape, not {x.shape} and {np.shape(y)}")
    return (difference * difference).mean()


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: TensorLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend over (B, H, T, D); a boolean mask is True where attention is allowed, a float mask is added to scores.

    The causal mask is aligned to the end: with more keys than queries (a cache), query t attends to keys up to
    S - T + t. A query whose keys are all masked gives zeros.
    """
    allowed = None if mask is None else _array(mask)
    return apply(primitives.Attention, q, k, v, causal=is_causal, mask=allowed, scale=scale)


def packed_causal_attention(qkv: Tensor, heads: int) -> Tensor:
    """Causal self-attention from the packed projection (B, T, 3·C) to (B, T, C)."""
    return apply(primitives.PackedAttention, qkv, heads=heads)
