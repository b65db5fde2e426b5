"""The matrix product and its gradient: three products of the backend, without copies of transposed operands."""

from __future__ import annotations

from tilewise.backend.registry import current_backend
from tilewise.errors import ShapeError
from tilewise.ops.base import Array, Grads, Operation


class MatMul(Operation):
    """Matrix product `@` as in NumPy and PyTorch: 1-D operands are vectors, leading dimensions broadcast."""

    def forward(self, a: Array, b: Array) -> Array:
        """Multiply as NumPy's `@`: vectors, matrices or batches."""
        self.a, self.b = a, b
        if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
            raise ShapeError(f"cannot multiply matrices of shapes {a.shape} and {b.shape}: the inner sizes differ")
        y: Array = current_backend().dispatch("matmul", a, b)
        return y

    def backward(self, grad: Array) -> Grads:
        """Compute ga = grad @ bᵀ and gb = aᵀ @ grad; vectors become matrices first, and are reduced at the end."""
        a = self.a[None, :] if self.a.ndim == 1 else self.a
        b = self.b[:, None] if self.b.ndim == 1 else self.b
        grad = grad[..., None, :] if self.a.ndim == 1 and self.b.ndim > 1 else grad
        grad = grad[..., None] if self.b.ndim == 1 else grad
        grad = grad[..., None] if grad.ndim == 1 else grad  # vector times vector
        matmul = current_backend().dispatch
        ga = gb = None
        if self.needs[0]:
            ga = matmul("matmul", grad, b.swapaxes(-1, -2))
            ga = ga.sum(axis=tuple(range(ga.ndim - 1))) if self.a.ndim == 1 else ga
        if self.needs[1]:
            # One matrix B for a whole batch: one product over all rows replaces a batch of products and a sum.
            if b.ndim == 2 and a.ndim > 2:
                a, grad = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
            gb = matmul("matmul", a.swapaxes(-1, -2), grad)
            gb = gb.sum(axis=tuple(range(gb.ndim - 2)))[:, 0] if self.b.ndim == 1 else gb
        return ga, gb

    def reads(self) -> tuple[int, ...]:
        return tuple(1 - i for i in (0, 1) if self.needs[i])
