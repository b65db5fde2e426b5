"""Operations that resize images: transposed convolution, dilated filters, interpolation.

A transposed convolution is the gradient of a convolution with respect to its input, so it runs the same kernels.
Interpolation works axis by axis: every output position is a weighted sum of a few input positions (taps): one for
nearest neighbour, two for linear, four for cubic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tilewise.backend.registry import current_backend
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.ops.base import Array, Grads, Operation

Pair = tuple[int, int]


class ConvTranspose2d(Operation):
    """Transposed convolution of (N, C, H, W) with filters (C, O/groups, kh, kw).

    The result is (N, O, stride·(H - 1) + kh - 2·padding + output_padding, ...).
    """

    def forward(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        stride: Pair,
        padding: Pair,
        output_padding: Pair,
        groups: int,
    ) -> Array:
        """Compute the transposed convolution as the input gradient of a convolution; sizes are checked."""
        if x.ndim != 4 or weight.ndim != 4 or x.shape[1] != weight.shape[0] or groups < 1 or len(weight) % groups:
            raise ShapeError(f"filters {weight.shape} in {groups} group(s) cannot be transposed over {x.shape}")
        if min(stride) < 1 or min(padding) < 0 or any(e < 0 or e >= s for e, s in zip(output_padding, stride)):  # noqa: B905
            raise ShapeError(
                f"stride {stride}, padding {padding} and output_padding {output_padding} do not fit together"
            )
        size = [
            (x.shape[2 + i] - 1) * stride[i] + weight.shape[2 + i] - 2 * padding[i] + output_padding[i] for i in (0, 1)
        ]
        if min(size) < 1 or 0 in x.shape[2:]:
            raise ShapeError(f"a transposed convolution of {x.shape} by {weight.shape} has an empty result")
        self.x, self.weight = np.ascontiguousarray(x), weight
        self.geometry = {"stride": stride, "padding": padding, "groups": groups}
        shape = (x.shape[0], weight.shape[1] * groups, *size)
        y: Array = current_backend().dispatch("conv2d_grad_input", self.x, weight, shape, **self.geometry)
        return y if bias is None else np.asarray(y + bias[:, None, None])

    def backward(self, grad: Array) -> Grads:
        """Return the gradients of input, weight and bias (if any); None for those not needed."""
        dispatch, grad = current_backend().dispatch, np.ascontiguousarray(grad)
        gx = gw = None
        if self.needs[0]:
            gx = dispatch("conv2d", grad, self.weight, None, **self.geometry)
        if self.needs[1]:
            gw = dispatch("conv2d_grad_weight", self.x, grad, self.weight.shape, **self.geometry)
        return (gx, gw) if len(self.needs) == 2 else (gx, gw, dispatch("sum_channels", grad) if self.needs[2] else None)

    def reads(self) -> tuple[int, ...]:
        return tuple(1 - i for i in (0, 1) if self.needs[i])


class Dilate(Operation):
    """Insert `step` - 1 zeros between the taps of filters, as a dilated convolution needs."""

    def forward(self, weight: Array, *, step: Pair) -> Array:
        """Insert step - 1 zeros between neighbouring elements of filters along height and width."""
        self.step = step
        kh, kw = weight.shape[-2:]
        out = np.zeros((*weight.shape[:-2], (kh - 1) * step[0] + 1, (kw - 1) * step[1] + 1), weight.dtype)
        out[..., :: step[0], :: step[1]] = weight
        return out

    def backward(self, grad: Array) -> Grads:
        return grad[..., :: self.step[0], :: self.step[1]]


@dataclass(frozen=True)
class Taps:
    """Input positions that each output position of an axis reads, and their weights: both (taps, size)."""

    positions: Array
    weights: Array


class Resample(Operation):
    """Weighted sums of elements along one axis."""

    def forward(self, x: Array, *, taps: Taps, axis: int) -> Array:
        """Resample one axis: output i is the sum of the inputs at `taps` positions, each times its weight."""
        self.shape, self.axis, self.positions = x.shape, axis, taps.positions
        broadcast_shape = (-1,) + (1,) * (x.ndim - axis - 1)
        self.weights = [row.astype(x.dtype).reshape(broadcast_shape) for row in taps.weights]
        if len(self.weights) == 1 and (taps.weights == 1).all():
            return np.asarray(x.take(self.positions[0], axis))
        total = x.take(self.positions[0], axis) * self.weights[0]
        for positions, weight in zip(self.positions[1:], self.weights[1:], strict=True):
            total += x.take(positions, axis) * weight
        return np.asarray(total)

    def backward(self, grad: Array) -> Grads:
        """Add each output element's gradient to the input positions that it was interpolated from."""
        g = np.zeros(self.shape, grad.dtype)
        leading_axes = (slice(None),) * self.axis
        for positions, weight in zip(self.positions, self.weights, strict=True):
            np.add.at(g, (*leading_axes, positions), grad * weight)
        return g


def nearest_taps(coordinates: Array, size: int) -> Taps:
    """Return one tap per coordinate, which is an integer; those outside of the axis are clipped."""
    positions = np.clip(coordinates, 0, size - 1).astype(np.intp)
    return Taps(positions[None], np.ones((1, len(positions))))


def linear_taps(coordinates: Array, size: int) -> Taps:
    """Return the two input positions around each coordinate with linear weights; positions are clipped."""
    inside = np.clip(coordinates, 0, size - 1)
    below = np.minimum(np.floor(inside), max(size - 2, 0)).astype(np.intp)
    fraction = inside - below
    return Taps(np.stack([below, np.minimum(below + 1, size - 1)]), np.stack([1 - fraction, fraction]))


def cubic_taps(coordinates: Array, size: int, a: float = -0.75, exclude_outside: bool = False) -> Taps:
    """Return the four input positions around each coordinate with cubic convolution weights (Keys 1981).

    `exclude_outside` drops taps outside the axis and normalises the remaining weights; otherwise they are clipped.
    """
    positions = np.floor(coordinates) + np.arange(-1, 3)[:, None]  # (4, size)
    distance = np.abs(coordinates - positions)
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    if exclude_outside:
        weights = np.where((positions < 0) | (positions >= size), 0.0, weights)
        weights = weights / weights.sum(0)
    return Taps(np.clip(positions, 0, size - 1).astype(np.intp), weights)


def image_taps(size: int, output_size: int, scale: float, mode: str, align_corners: bool) -> Taps:
    """Return the taps that resize one axis, with the coordinates of PyTorch's `interpolate`."""
    out = np.arange(output_size, dtype=np.float64)
    if mode == "nearest":
        return nearest_taps(np.floor(out / scale), size)
    if mode != "bilinear":
        raise ConfigurationError(f"there is no interpolation {mode!r}; choose nearest or bilinear")
    coordinates = out * ((size - 1) / max(output_size - 1, 1)) if align_corners else (out + 0.5) / scale - 0.5
    return linear_taps(coordinates, size)


def scaled_size(size: int, scale: float) -> int:
    return math.floor(size * scale)
