"""Base class of operations: `forward` and `backward` over arrays.

An operation object is created for each use. `forward` stores on `self` what `backward` needs; `backward` converts the
gradient of the result to gradients of the inputs. The engine in autograd.py does three things for all operations: it
sums a gradient to the shape of a broadcast input, casts it to the input's dtype, and skips inputs that need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ShapeError

Array = npt.NDArray[Any]
Axis = int | tuple[int, ...] | None
Grads = Any  # one array, or a tuple with one array or None per input

silent = np.errstate(all="ignore")  # as in PyTorch, overflow and 0/0 give inf and nan without a warning


class Operation:
    """One node of the graph. `needs[i]` is True if input i needs a gradient; the engine sets it after `forward`."""

    saves: tuple[int, ...] = ()  # inputs whose values `backward` reads; changing them in place is an error
    saves_output = False  # True if `backward` reads the result; changing it in place is an error
    is_view = False  # True if the result may share memory with input 0

    needs: tuple[bool, ...] = ()
    inputs: tuple[Any, ...] = ()  # the input tensors
    saved: tuple[tuple[list[int], int], ...] = ()  # version counters of the saved values, and their numbers then
    order = 0
    retain: Any = None  # weak reference to the result if its gradient is to be stored

    forward: Callable[..., Array]  # arrays, then parameters by name

    def backward(self, grad: Array) -> Grads:
        raise NotImplementedError

    def reads(self) -> tuple[int, ...]:
        """Return the indices of inputs whose values `backward` needs for the gradients that are requested."""
        return self.saves


def floating(x: Array) -> Array:
    """Convert integers to float32, as PyTorch does for functions with real results."""
    return x if x.dtype.kind == "f" else x.astype(np.float32)


def reduced_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Normalize an axis argument to a tuple of non-negative axes; None means all axes."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if any(not -max(ndim, 1) <= a < max(ndim, 1) for a in axes):
        raise ShapeError(f"axis {axis} does not exist in a tensor with {ndim} dimensions")
    return tuple(a % ndim for a in axes) if ndim else ()
