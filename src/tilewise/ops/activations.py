"""Activations with their gradients, in NumPy: error function, SiLU, hard swish, ELU and others.

Where a function is not differentiable, the gradient is the same as PyTorch's.
"""

from __future__ import annotations

import math

import numpy as np

from tilewise.backend.numpy_ops import erf
from tilewise.ops.base import Array, Grads, Operation, floating, silent


def _sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    exponential = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, x.dtype.type(1), exponential) / (1 + exponential))


class Erf(Operation):
    saves = (0,)

    @silent
    def forward(self, x: Array) -> Array:
        self.x = floating(x)
        return erf(self.x)

    def backward(self, grad: Array) -> Grads:
        return grad * np.exp(-self.x * self.x) * self.x.dtype.type(2 / math.sqrt(math.pi))


class Silu(Operation):
    """SiLU (swish), x · sigmoid(x)."""

    saves = (0,)

    @silent
    def forward(self, x: Array) -> Array:
        """Compute x * sigmoid(x)."""
        self.x = floating(x)
        self.gate = _sigmoid(self.x)
        return np.asarray(self.x * self.gate)

    def backward(self, grad: Array) -> Grads:
        return grad * self.gate * (1 + self.x * (1 - self.gate))


class HardSigmoid(Operation):
    """Hard sigmoid, clip(`slope`·x + `offset`, 0, 1)."""

    saves = (0,)

    def forward(self, x: Array, *, slope: float = 1 / 6, offset: float = 0.5) -> Array:
        self.x, self.slope, self.offset = x, x.dtype.type(slope), x.dtype.type(offset)
        return np.asarray(np.clip(x * self.slope + self.offset, 0, 1))

    def backward(self, grad: Array) -> Grads:
        linear = self.x * self.slope + self.offset
        return grad * self.slope * ((linear > 0) & (linear < 1))


class HardSwish(Operation):
    """Hard swish, x · clip(x/6 + 1/2, 0, 1)."""

    saves = (0,)

    def forward(self, x: Array) -> Array:
        self.x = x
        return np.asarray(x * (np.clip(x + 3, 0, 6) / x.dtype.type(6)))

    def backward(self, grad: Array) -> Grads:
        inside = self.x / self.x.dtype.type(3) + self.x.dtype.type(0.5)
        return grad * np.where(self.x <= -3, 0, np.where(self.x >= 3, 1, inside)).astype(grad.dtype)


class LeakyRelu(Operation):
    saves = (0,)

    def forward(self, x: Array, *, slope: float) -> Array:
        self.x, self.slope = x, x.dtype.type(slope)
        return np.where(x > 0, x, x * self.slope)

    def backward(self, grad: Array) -> Grads:
        return np.where(self.x > 0, grad, grad * self.slope)


class Shrink(Operation):
    """Values beyond ±`limit` moved towards zero by `bias`, zero between: hard (bias 0) and soft (bias = limit)."""

    saves = (0,)

    def forward(self, x: Array, *, limit: float, bias: float) -> Array:
        """Move x towards 0 by `bias` where |x| > limit; the rest becomes 0."""
        kind = x.dtype.type
        self.x, self.limit = x, kind(limit)
        above = np.where(x > self.limit, x - kind(bias), kind(0))
        return np.asarray(np.where(x < -self.limit, x + kind(bias), above))

    def backward(self, grad: Array) -> Grads:
        return np.where(np.abs(self.x) > self.limit, grad, grad.dtype.type(0))


class Elu(Operation):
    """ELU: x above zero, `alpha`·(exp(x/`width`) - 1) below. `scale` and `width` generalise it to SELU and CELU."""

    saves = (0,)

    @silent
    def forward(self, x: Array, *, alpha: float = 1.0, width: float = 1.0, scale: float = 1.0) -> Array:
        """Compute scale * x for x > 0, else scale * alpha * (exp(x / width) - 1)."""
        kind = x.dtype.type
        self.x, self.alpha, self.width, self.scale = x, kind(alpha), kind(width), kind(scale)
        below = self.alpha * np.expm1(np.minimum(x, 0) / self.width)
        return np.asarray(self.scale * np.where(x > 0, x, below))

    def backward(self, grad: Array) -> Grads:
        below = self.alpha / self.width * np.exp(np.minimum(self.x, 0) / self.width)
        return grad * self.scale * np.where(self.x > 0, grad.dtype.type(1), below)


class Softplus(Operation):
    """Softplus, log(1 + exp(x)), without overflow."""

    saves = (0,)

    @silent
    def forward(self, x: Array) -> Array:
        self.x = floating(x)
        return np.asarray(np.logaddexp(self.x, self.x.dtype.type(0)))

    def backward(self, grad: Array) -> Grads:
        return grad * _sigmoid(self.x)
