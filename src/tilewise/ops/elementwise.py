"""Elementwise operations with broadcasting, as in NumPy and PyTorch."""

from __future__ import annotations

import numpy as np

from tilewise.backend.registry import current_backend
from tilewise.ops.base import Array, Grads, Operation, floating, silent


class Add(Operation):
    @silent
    def forward(self, a: Array, b: Array) -> Array:
        return np.add(a, b)

    def backward(self, grad: Array) -> Grads:
        return grad, grad


class Sub(Operation):
    @silent
    def forward(self, a: Array, b: Array) -> Array:
        return np.subtract(a, b)

    def backward(self, grad: Array) -> Grads:
        return grad, -grad if self.needs[1] else None


class Mul(Operation):
    @silent
    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return np.multiply(a, b)

    def backward(self, grad: Array) -> Grads:
        return grad * self.b if self.needs[0] else None, grad * self.a if self.needs[1] else None

    def reads(self) -> tuple[int, ...]:
        return tuple(1 - i for i in (0, 1) if self.needs[i])


class Div(Operation):
    @silent
    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return np.divide(floating(a), floating(b)) if a.dtype.kind != "f" else np.divide(a, b)

    def backward(self, grad: Array) -> Grads:
        ga = grad / self.b
        return ga, -ga * self.a / self.b if self.needs[1] else None

    def reads(self) -> tuple[int, ...]:
        return (0, 1) if self.needs[1] else (1,)


class Pow(Operation):
    """Power a ** b, with gradients for both operands."""

    saves = (0, 1)

    @silent
    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return np.power(a, b)

    def backward(self, grad: Array) -> Grads:
        """Return the gradients of base and exponent; None for one not needed."""
        a, b = self.a, self.b
        ga = gb = None
        # Limits where the formulas give NaN: x⁰ is constant, and 0ᵇ is constant for b >= 0.
        if self.needs[0]:
            ga = np.where(b == 0, 0, grad * b * np.power(a, b - 1))
        if self.needs[1]:
            gb = np.where((a == 0) & (b >= 0), 0, grad * np.power(a, b) * np.log(a))
        return ga, gb


class Neg(Operation):
    def forward(self, x: Array) -> Array:
        return np.negative(x)

    def backward(self, grad: Array) -> Grads:
        return -grad


class Exp(Operation):
    saves_output = True

    @silent
    def forward(self, x: Array) -> Array:
        self.y = np.exp(floating(x))
        return self.y

    def backward(self, grad: Array) -> Grads:
        return grad * self.y


class Log(Operation):
    saves = (0,)

    @silent
    def forward(self, x: Array) -> Array:
        self.x = x
        return np.log(floating(x))

    def backward(self, grad: Array) -> Grads:
        return grad / self.x


class Sqrt(Operation):
    saves_output = True

    @silent
    def forward(self, x: Array) -> Array:
        self.y = np.sqrt(floating(x))
        return self.y

    def backward(self, grad: Array) -> Grads:
        return grad / (2 * self.y)


class Abs(Operation):
    saves = (0,)

    def forward(self, x: Array) -> Array:
        self.x = x
        return np.abs(x)

    def backward(self, grad: Array) -> Grads:
        return grad * np.sign(self.x)


class Tanh(Operation):
    saves_output = True

    def forward(self, x: Array) -> Array:
        self.y = np.tanh(floating(x))
        return self.y

    def backward(self, grad: Array) -> Grads:
        return grad * (1 - self.y * self.y)


class Sigmoid(Operation):
    saves_output = True

    @silent
    def forward(self, x: Array) -> Array:
        self.y = np.asarray(1 / (1 + np.exp(-floating(x))))
        return self.y

    def backward(self, grad: Array) -> Grads:
        return grad * self.y * (1 - self.y)


class Sin(Operation):
    saves = (0,)

    @silent
    def forward(self, x: Array) -> Array:
        self.x = x
        return np.sin(floating(x))

    def backward(self, grad: Array) -> Grads:
        return grad * np.cos(self.x)


class Cos(Operation):
    saves = (0,)

    @silent
    def forward(self, x: Array) -> Array:
        self.x = x
        return np.cos(floating(x))

    def backward(self, grad: Array) -> Grads:
        return -grad * np.sin(self.x)


class Relu(Operation):
    saves_output = True

    def forward(self, x: Array) -> Array:
        """Compute max(x, 0); the result is saved for the gradient."""
        y: Array = current_backend().dispatch("relu", x)
        self.y = y
        return y

    def backward(self, grad: Array) -> Grads:
        return current_backend().dispatch("relu_grad", self.y, grad)


class Gelu(Operation):
    """Exact GELU, x Φ(x)."""

    saves = (0,)

    def forward(self, x: Array) -> Array:
        """Compute GELU, in floating point also for integers."""
        self.x = floating(x)
        y: Array = current_backend().dispatch("gelu", self.x)
        return y

    def backward(self, grad: Array) -> Grads:
        return current_backend().dispatch("gelu_grad", self.x, grad)


class Clip(Operation):
    saves = (0,)

    def forward(self, x: Array, *, low: float | None, high: float | None) -> Array:
        self.x, self.low, self.high = x, low, high
        return np.asarray(np.clip(x, low, high))

    def backward(self, grad: Array) -> Grads:
        """Pass the gradient where low <= x <= high, 0 elsewhere."""
        inside = np.ones(self.x.shape, bool)
        if self.low is not None:
            inside &= self.x >= self.low
        if self.high is not None:
            inside &= self.x <= self.high
        return grad * inside


class Where(Operation):
    """Select `a` where the condition is true, else `b`; the condition is a parameter, not an input."""

    def forward(self, a: Array, b: Array, *, condition: Array) -> Array:
        self.condition = condition
        return np.where(condition, a, b)

    def backward(self, grad: Array) -> Grads:
        return np.where(self.condition, grad, 0), np.where(self.condition, 0, grad)


class Maximum(Operation):
    """Maximum (minimum with `sign=-1`) of two tensors; equal values share the gradient."""

    saves = (0, 1)

    def forward(self, a: Array, b: Array, *, sign: int = 1) -> Array:
        self.a, self.b, self.sign = a, b, sign
        return np.maximum(a, b) if sign > 0 else np.minimum(a, b)

    def backward(self, grad: Array) -> Grads:
        """Pass the gradient to the operand that won; equal operands get half each."""
        difference = (self.a - self.b) * self.sign
        tie = np.where(difference == 0, grad / 2, 0)
        return np.where(difference > 0, grad, tie), np.where(difference < 0, grad, tie)
