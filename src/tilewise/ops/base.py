"""What every operation is: a class with `forward` and `backward` over plain arrays.

An operation is made once per use. `forward` keeps on `self` what `backward` will need, `backward` turns the gradient of
the result into gradients of the inputs. Three things are left to the engine in autograd.py: summing a gradient back to
the shape of an input that was broadcast, casting it to the input's dtype, and skipping inputs that need none.
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

silent = np.errstate(all="ignore")  # as in PyTorch, overflow and 0/0 give inf and nan without a word


class Operation:
    """One step of the graph. `needs[i]` says whether input i needs a gradient; the engine sets it after `forward`."""

    saves: tuple[int, ...] = ()  # inputs whose values `backward` reads: changing them in place is an error
    saves_output = False  # the same for the result
    is_view = False  # the result may share memory with input 0

    needs: tuple[bool, ...] = ()
    inputs: tuple[Any, ...] = ()  # the input tensors
    saved: tuple[tuple[list[int], int], ...] = ()  # version counters and what they read when saved
    order = 0
    retain: Any = None  # a weak reference to the result, where its gradient is to be kept

    forward: Callable[..., Array]  # arrays, then parameters by name

    def backward(self, grad: Array) -> Grads:
        raise NotImplementedError

    def reads(self) -> tuple[int, ...]:
        return self.saves


def floating(x: Array) -> Array:
    """Integers become float32, as PyTorch does for functions with real results."""
    return x if x.dtype.kind == "f" else x.astype(np.float32)


def reduced_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """The axes as non-negative numbers; all of them for None."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if any(not -max(ndim, 1) <= a < max(ndim, 1) for a in axes):
        raise ShapeError(f"axis {axis} does not exist in a tensor with {ndim} dimensions")
    return tuple(a % ndim for a in axes) if ndim else ()
