"""Operations that move elements without changing them: reshaping, concatenation, indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.registry import current_backend
from tilewise.errors import DtypeError, ShapeError
from tilewise.ops.base import Array, Grads, Operation, reduced_axes


class Reshape(Operation):
    is_view = True

    def forward(self, x: Array, *, shape: tuple[int, ...]) -> Array:
        self.shape = x.shape
        return x.reshape(shape)

    def backward(self, grad: Array) -> Grads:
        return grad.reshape(self.shape)


class Permute(Operation):
    is_view = True

    def forward(self, x: Array, *, axes: tuple[int, ...]) -> Array:
        self.axes = axes
        return x.transpose(axes)

    def backward(self, grad: Array) -> Grads:
        return grad.transpose(np.argsort(reduced_axes(self.axes, grad.ndim)))


class Expand(Operation):
    """Broadcast to a shape; the engine sums the gradient."""

    is_view = True

    def forward(self, x: Array, *, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(x, shape)

    def backward(self, grad: Array) -> Grads:
        return grad


class Cat(Operation):
    def forward(self, *arrays: Array, axis: int) -> Array:
        """Concatenate arrays along an axis."""
        self.axis = axis
        self.ends = np.cumsum([a.shape[axis] for a in arrays])[:-1]
        return np.concatenate(arrays, axis=axis)

    def backward(self, grad: Array) -> Grads:
        return tuple(np.split(grad, self.ends, axis=self.axis))


class Pad(Operation):
    def forward(self, x: Array, *, widths: tuple[tuple[int, int], ...], value: float) -> Array:
        self.inner = tuple(slice(before, before + size) for (before, _), size in zip(widths, x.shape, strict=True))
        return np.pad(x, widths, constant_values=value)

    def backward(self, grad: Array) -> Grads:
        return grad[self.inner]


class Cast(Operation):
    def forward(self, x: Array, *, dtype: npt.DTypeLike) -> Array:
        return x.astype(dtype)

    def backward(self, grad: Array) -> Grads:
        return grad


class Copy(Operation):
    def forward(self, x: Array) -> Array:
        return np.array(x, order="C")

    def backward(self, grad: Array) -> Grads:
        return grad


def is_basic(index: Any) -> bool:
    """Tell whether an index is basic (integers, slices, None and ..., no arrays), so that it gives a view."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, int | np.integer) and not isinstance(item, bool))
        for item in items
    )


class GetItem(Operation):
    """Indexing x[index]; the gradients of repeated positions are added."""

    is_view = True

    def forward(self, x: Array, *, index: Any) -> Array:
        """Compute x[index]; an index that does not fit raises `ShapeError`."""
        self.shape, self.index = x.shape, index
        try:
            return np.asarray(x[index])
        except IndexError as error:
            raise ShapeError(f"the index does not fit a tensor of shape {x.shape}: {error}") from None

    def backward(self, grad: Array) -> Grads:
        """Write or add the gradient at the indexed positions."""
        if self.is_row_lookup():
            rows = grad.reshape(-1, self.shape[1])
            return current_backend().dispatch("embedding_grad", rows, self.index.ravel() % self.shape[0], self.shape[0])
        g = np.zeros(self.shape, grad.dtype)
        if is_basic(self.index):
            g[self.index] = grad
        else:
            np.add.at(g, self.index, grad)
        return g

    def is_row_lookup(self) -> bool:
        return isinstance(self.index, np.ndarray) and self.index.dtype.kind == "i" and len(self.shape) == 2


class SetItem(Operation):
    """Copy x and write `value` at `index`."""

    def forward(self, x: Array, value: Array, *, index: Any) -> Array:
        """Return a copy of x with x[index] = value."""
        self.index = index
        y = x.copy()
        try:
            y[index] = value
        except IndexError as error:
            raise ShapeError(f"the index does not fit a tensor of shape {x.shape}: {error}") from None
        return y

    def backward(self, grad: Array) -> Grads:
        """Return the gradients of x (0 where it was overwritten) and of the value."""
        gx = grad.copy()
        gx[self.index] = 0
        return gx, grad[self.index]


class TakeAlongAxis(Operation):
    """Gather one element per position along an axis, like `torch.gather`."""

    def forward(self, x: Array, *, indices: Array, axis: int) -> Array:
        """Take elements by integer indices along an axis, as `numpy.take_along_axis`."""
        self.shape, self.indices, self.axis = x.shape, indices, axis
        if indices.dtype.kind not in "iu":
            raise DtypeError(f"gather needs integer positions, not {indices.dtype}")
        try:
            return np.take_along_axis(x, indices, axis)
        except IndexError as error:
            raise ShapeError(f"gather: {error}") from None

    def backward(self, grad: Array) -> Grads:
        """Add the gradient of each element to the position it was taken from."""
        g = np.zeros(self.shape, grad.dtype)
        positions = list(np.ix_(*(np.arange(n) for n in self.indices.shape)))
        positions[self.axis] = self.indices
        np.add.at(g, tuple(positions), grad)
        return g
