"""Operations along axes: sums, means, extremes, softmax."""

from __future__ import annotations

import math

import numpy as np

from tilewise.backend.registry import current_backend
from tilewise.errors import ShapeError
from tilewise.ops.base import Array, Axis, Grads, Operation, floating, reduced_axes, silent


class Reduction(Operation):
    """Base class of reductions: the axes, and the expansion of a gradient to them."""

    def prepare(self, x: Array, axis: Axis, keepdims: bool) -> tuple[int, ...]:
        """Save x's shape and the reduced axes for `backward`, and return the axes as non-negative numbers."""
        self.shape, self.keepdims = x.shape, keepdims
        self.axes = reduced_axes(axis, x.ndim)
        self.count = math.prod(x.shape[a] for a in self.axes)
        return self.axes

    def expand(self, grad: Array) -> Array:
        """Restore the reduced axes in `grad`, as axes of size one."""
        return grad if self.keepdims else np.expand_dims(grad, self.axes)


class Sum(Reduction):
    @silent
    def forward(self, x: Array, *, axis: Axis = None, keepdims: bool = False) -> Array:
        return np.asarray(x.sum(axis=self.prepare(x, axis, keepdims), keepdims=keepdims))

    def backward(self, grad: Array) -> Grads:
        return np.broadcast_to(self.expand(grad), self.shape)


class Mean(Reduction):
    @silent
    def forward(self, x: Array, *, axis: Axis = None, keepdims: bool = False) -> Array:
        """Average over the axes (None: all), in floating point also for integers."""
        axes = self.prepare(x, axis, keepdims)
        x = floating(x)
        return np.asarray(x.sum(axis=axes, keepdims=keepdims) / x.dtype.type(self.count))

    def backward(self, grad: Array) -> Grads:
        return np.broadcast_to(self.expand(grad / grad.dtype.type(self.count)), self.shape)


class Var(Reduction):
    """Variance; `correction` is subtracted from the count (1: unbiased, as in PyTorch)."""

    saves = (0,)

    @silent
    def forward(self, x: Array, *, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> Array:
        """Compute the variance over the axes (None: all): squares divided by count - correction."""
        axes, x = self.prepare(x, axis, keepdims), floating(x)
        self.centred = x - x.mean(axis=axes, keepdims=True)
        self.degrees = max(self.count - correction, 0)
        return np.asarray((self.centred**2).sum(axis=axes, keepdims=keepdims) / x.dtype.type(self.degrees))

    def backward(self, grad: Array) -> Grads:
        return self.expand(grad) * self.centred * (grad.dtype.type(2) / grad.dtype.type(self.degrees))


class Max(Reduction):
    """Maximum (minimum with `sign=-1`); equal values share the gradient, as in `torch.amax`."""

    saves = (0,)
    saves_output = True

    def forward(self, x: Array, *, axis: Axis = None, keepdims: bool = False, sign: int = 1) -> Array:
        """Compute the maximum (sign > 0) or minimum (sign < 0) over the axes (None: all)."""
        axes = self.prepare(x, axis, keepdims)
        if not self.count:
            raise ShapeError(f"the maximum or minimum of no elements is undefined: shape {x.shape}, axis {axis}")
        self.x = x
        self.y = np.asarray(x.max(axis=axes, keepdims=keepdims) if sign > 0 else x.min(axis=axes, keepdims=keepdims))
        return self.y

    def backward(self, grad: Array) -> Grads:
        is_extreme = self.x == self.expand(self.y)
        return is_extreme * (self.expand(grad) / is_extreme.sum(axis=self.axes, keepdims=True, dtype=grad.dtype))


class CumSum(Operation):
    def forward(self, x: Array, *, axis: int) -> Array:
        self.axis = axis
        return np.cumsum(x, axis=axis)

    def backward(self, grad: Array) -> Grads:
        return np.flip(np.cumsum(np.flip(grad, self.axis), axis=self.axis), self.axis)


class Softmax(Operation):
    saves_output = True

    def forward(self, x: Array, *, axis: int, log: bool = False) -> Array:
        """Compute the softmax, or its logarithm, along one axis."""
        (self.axis,) = reduced_axes(axis, x.ndim) or (-1,)
        self.name = "log_softmax" if log else "softmax"
        self.y: Array = self.on_last_axis(self.name, floating(x))
        return self.y

    def backward(self, grad: Array) -> Grads:
        return self.on_last_axis(self.name + "_grad", self.y, grad)

    def on_last_axis(self, name: str, *arrays: Array) -> Array:
        """Run a backend operation that works on the last axis along `self.axis` instead."""
        if arrays[0].ndim == 0:
            return self.on_last_axis(name, *(a[None] for a in arrays))[0, ...]
        if self.axis == arrays[0].ndim - 1 or self.axis == -1:
            y: Array = current_backend().dispatch(name, *arrays)
            return y
        # Kernels need the axis to be last and contiguous.
        y = current_backend().dispatch(name, *(np.ascontiguousarray(a.swapaxes(self.axis, -1)) for a in arrays))
        return np.ascontiguousarray(y.swapaxes(self.axis, -1))
