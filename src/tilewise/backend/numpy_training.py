"""NumPy versions of operations that only training uses: sums for biases and norms, batch norm, in-place updates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.registry import implements

Array = npt.NDArray[Any]

_silent = np.errstate(all="ignore")


@implements("sum_rows", "numpy")
@_silent
def sum_rows(x: Array) -> Array:
    """Sum over all axes but the last: the gradient of a bias."""
    return np.asarray(x.reshape(-1, x.shape[-1]).sum(axis=0) if x.size else np.zeros(x.shape[-1], x.dtype))


@implements("sum_channels", "numpy")
@_silent
def sum_channels(x: Array) -> Array:
    """Sum over all axes but the second: the gradient of a convolution's bias."""
    return np.asarray(x.sum(axis=_all_but_channels(x)))


@implements("sum_of_squares", "numpy")
@_silent
def sum_of_squares(x: Array) -> float:
    flat = x.astype(np.float64).ravel()
    return float(flat @ flat)


@implements("batch_norm", "numpy")
@_silent
def batch_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Normalise (N, C, ...) over all axes but the channels; also return the mean and biased variance per channel."""
    axes, shape = _all_but_channels(x), _per_channel(x)
    mean = x.mean(axis=axes)
    centred = x - mean.reshape(shape)
    var = (centred * centred).mean(axis=axes)
    scale = weight / np.sqrt(var + x.dtype.type(eps))
    return centred * scale.reshape(shape) + bias.reshape(shape), mean, var


@implements("batch_norm_grad", "numpy")
@_silent
def batch_norm_grad(
    gy: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, weight and bias from that of the result, gy, and the batch's mean and var."""
    axes, shape = _all_but_channels(x), _per_channel(x)
    rstd = 1 / np.sqrt(var + x.dtype.type(eps))
    normed = (x - mean.reshape(shape)) * rstd.reshape(shape)
    gbias, gweight = gy.sum(axis=axes), (gy * normed).sum(axis=axes)
    count = math.prod(x.shape[i] for i in axes)
    gx = gy - (gbias / count).reshape(shape) - normed * (gweight / count).reshape(shape)
    return gx * (weight * rstd).reshape(shape), gweight, gbias


def _all_but_channels(x: Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _per_channel(x: Array) -> tuple[int, ...]:
    return (-1, *([1] * (x.ndim - 2)))


@implements("add_in_place", "numpy")
@_silent
def add_in_place(total: Array, summand: Array) -> None:
    total += summand


@implements("scale_in_place", "numpy")
@_silent
def scale_in_place(x: Array, factor: float) -> None:
    x *= factor
