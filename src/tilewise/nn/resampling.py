"""Operations that make images larger or smaller: transposed convolution, filters with holes, interpolation.

A transposed convolution is the gradient of a convolution with respect to its input, so it runs the same kernels.
Interpolation works axis by axis: every output position is a weighted sum of a few input positions (`taps`), one for
the nearest neighbour, two for linear, four for cubic.
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
    """(N, C, H, W) with filters (C, O/groups, kh, kw) to (N, O, stride·(H - 1) + kh - 2·padding + extra, ...)."""

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
        if x.ndim != 4 or weight.ndim != 4 or x.shape[1] != weight.shape[0] or groups < 1 or len(weight) % groups:
            raise ShapeError(f"filters {weight.shape} in {groups} group(s) cannot be transposed over {x.shape}")
        if min(stride) < 1 or min(padding) < 0 or any(e < 0 or e >= s for e, s in zip(output_padding, stride)):  # noqa: B905
            raise ShapeError(f"stride {stride}, padding {padding} and {output_padding} more pixels do not fit together")
        size = [
            (x.shape[2 + i] - 1) * stride[i] + weight.shape[2 + i] - 2 * padding[i] + output_padding[i] for i in (0, 1)
        ]
        if min(size) < 1 or 0 in x.shape[2:]:
            raise ShapeError(f"a transposed convolution of {x.shape} by {weight.shape} leaves no pixels")
        self.x, self.weight = np.ascontiguousarray(x), weight
        self.how = {"stride": stride, "padding": padding, "groups": groups}
        shape = (x.shape[0], weight.shape[1] * groups, *size)
        y: Array = current_backend().dispatch("conv2d_grad_input", self.x, weight, shape, **self.how)
        return y if bias is None else np.asarray(y + bias[:, None, None])

    def backward(self, grad: Array) -> Grads:
        dispatch, grad = current_backend().dispatch, np.ascontiguousarray(grad)
        gx = gw = None
        if self.needs[0]:
            gx = dispatch("conv2d", grad, self.weight, None, **self.how)
        if self.needs[1]:
            gw = dispatch("conv2d_grad_weight", self.x, grad, self.weight.shape, **self.how)
        return (gx, gw) if len(self.needs) == 2 else (gx, gw, dispatch("sum_channels", grad) if self.needs[2] else None)

    def reads(self) -> tuple[int, ...]:
        return tuple(1 - i for i in (0, 1) if self.needs[i])


class Dilate(Operation):
    """Filters with `step` - 1 zeros between neighbours: what a dilated convolution multiplies by."""

    def forward(self, weight: Array, *, step: Pair) -> Array:
        self.step = step
        kh, kw = weight.shape[-2:]
        out = np.zeros((*weight.shape[:-2], (kh - 1) * step[0] + 1, (kw - 1) * step[1] + 1), weight.dtype)
        out[..., :: step[0], :: step[1]] = weight
        return out

    def backward(self, grad: Array) -> Grads:
        return grad[..., :: self.step[0], :: self.step[1]]


@dataclass(frozen=True)
class Taps:
    """For each output position of an axis: which input positions it reads, (taps, size), and their weights."""

    positions: Array
    weights: Array


class Resample(Operation):
    """Weighted sums of entries along one axis."""

    def forward(self, x: Array, *, taps: Taps, axis: int) -> Array:
        self.shape, self.axis, self.positions = x.shape, axis, taps.positions
        spread = (-1,) + (1,) * (x.ndim - axis - 1)
        self.weights = [row.astype(x.dtype).reshape(spread) for row in taps.weights]
        if len(self.weights) == 1 and (taps.weights == 1).all():
            return np.asarray(x.take(self.positions[0], axis))
        total = x.take(self.positions[0], axis) * self.weights[0]
        for where, weight in zip(self.positions[1:], self.weights[1:], strict=True):
            total += x.take(where, axis) * weight
        return np.asarray(total)

    def backward(self, grad: Array) -> Grads:
        g = np.zeros(self.shape, grad.dtype)
        first = (slice(None),) * self.axis
        for where, weight in zip(self.positions, self.weights, strict=True):
            np.add.at(g, (*first, where), grad * weight)
        return g


def nearest_taps(places: Array, size: int) -> Taps:
    """The one entry at each of `places`, which are whole numbers and may lie outside."""
    chosen = np.clip(places, 0, size - 1).astype(np.intp)
    return Taps(chosen[None], np.ones((1, len(chosen))))


def linear_taps(places: Array, size: int) -> Taps:
    """The two entries around each of `places`, weighted by nearness; outside, the last one."""
    inside = np.clip(places, 0, size - 1)
    below = np.minimum(np.floor(inside), max(size - 2, 0)).astype(np.intp)
    share = inside - below
    return Taps(np.stack([below, np.minimum(below + 1, size - 1)]), np.stack([1 - share, share]))


def cubic_taps(places: Array, size: int, a: float = -0.75, leave_out: bool = False) -> Taps:
    """Four entries around each of `places` by Keys' cubic; `leave_out` drops those outside and scales the rest up."""
    below = np.floor(places)
    distance = np.abs(places - (below + np.arange(-1, 3)[:, None]))
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    where = below + np.arange(-1, 3)[:, None]
    if leave_out:
        weights = np.where((where < 0) | (where >= size), 0.0, weights)
        weights = weights / weights.sum(0)
    return Taps(np.clip(where, 0, size - 1).astype(np.intp), weights)


def image_taps(size: int, wanted: int, scale: float, mode: str, align_corners: bool) -> Taps:
    """How PyTorch's `interpolate` reads an axis of `size` to make `wanted` positions."""
    out = np.arange(wanted, dtype=np.float64)
    if mode == "nearest":
        return nearest_taps(np.floor(out / scale), size)
    if mode != "bilinear":
        raise ConfigurationError(f"there is no interpolation {mode!r}; choose nearest or bilinear")
    places = out * ((size - 1) / max(wanted - 1, 1)) if align_corners else (out + 0.5) / scale - 0.5
    return linear_taps(places, size)


def scaled(size: int, scale: float) -> int:
    return math.floor(size * scale)
