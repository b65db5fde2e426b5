"""The backward pass: hand gradients from results to inputs, newest operation first.

Operations were numbered as they happened, so the highest number still waiting is always one whose result nobody newer
uses: its gradient is complete. A heap of numbers is therefore all the graph traversal there is.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._events import recorders
from tilewise.backend.registry import current_backend
from tilewise.errors import GradientError
from tilewise.ops.base import Operation

if TYPE_CHECKING:
    from tilewise.tensor import Tensor

Array = npt.NDArray[Any]


def walk_back(root: Tensor, seed: Array, retain_graph: bool) -> None:
    """Visit operations from the newest to the oldest, passing each the sum of the gradients its result received."""
    waiting: dict[int, tuple[Operation, Array, bool]] = {}  # order -> operation, gradient, "may be added to in place"
    newest: list[int] = []

    def receive(t: Tensor, g: Array, owned: bool) -> None:
        """Add a gradient to a leaf, or to the operation that computed the tensor."""
        step = t._step
        if step is None:
            t.accumulate_grad(g, owned)
        elif step.order in waiting:
            _, total, is_owned = waiting[step.order]
            if is_owned:
                current_backend().dispatch("add_in_place", total, g)
            waiting[step.order] = step, (total if is_owned else total + g), True
        else:
            waiting[step.order] = step, g, owned
            heapq.heappush(newest, -step.order)

    receive(root, seed, False)
    while newest:
        step, grad, _ = waiting.pop(-heapq.heappop(newest))
        if step.retain is not None and (output := step.retain()) is not None:
            output.accumulate_grad(grad, False)
        _check_saved(step)
        grads = recorders.hooks.record_backward(step, grad) if recorders else step.backward(grad)
        for t, g in zip(step.inputs, grads if isinstance(grads, tuple) else (grads,), strict=True):
            if g is not None and t.requires_grad:
                g = _sum_to_shape(g, t._array)
                receive(t, g, g is not grad and not isinstance(g.base, np.ndarray))
        if not retain_graph:
            step.__dict__.clear()
            step.inputs, step.saved = (), _USED


_USED: tuple[tuple[list[int], int], ...] = (([1], 0),)  # marks an operation whose saved values were freed


def _check_saved(step: Operation) -> None:
    """Raise GradientError if the values that an operation saved for its gradient were freed or changed in place."""
    if step.saved is _USED:
        raise GradientError("backward() was already called on this graph; pass retain_graph=True to call it again")
    for counter, version in step.saved:
        if counter[0] != version:
            changes = counter[0] - version
            raise GradientError(
                f"a value that {type(step).__name__} needs for its gradient was changed in place "
                f"({changes} time{'s' if changes > 1 else ''}); change a copy instead"
            )


def _sum_to_shape(g: Array, like: Array) -> Array:
    """Convert a gradient to the shape and dtype of its tensor: broadcast axes are summed."""
    if g.shape != like.shape:
        g = g.sum(axis=tuple(range(g.ndim - like.ndim)))
        broadcast = tuple(i for i, n in enumerate(like.shape) if n == 1 and g.shape[i] != 1)
        g = np.asarray(g.sum(axis=broadcast, keepdims=True) if broadcast else g)
    return g if g.dtype == like.dtype else g.astype(like.dtype)
