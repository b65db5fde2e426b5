"""The backward pass: hand gradients from results to inputs, newest operation first.

Operations were numbered as they happened, so the highest number still waiting is always one whose result nobody newer
uses: its gradient is complete. A heap of numbers is therefore all the graph traversal there is.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise import _events
from tilewise._events import recorders
from tilewise.backend.registry import current_backend
from tilewise.errors import GradientError
from tilewise.ops.base import Operation

if TYPE_CHECKING:
    from tilewise.tensor import Tensor

Array = npt.NDArray[Any]


def walk_back(root: Tensor, seed: Array, retain_graph: bool) -> None:
    """Visit operations from the newest to the oldest, handing each the sum of the gradients its result received."""
    waiting: dict[int, tuple[Operation, Array, bool]] = {}  # order -> operation, gradient, "may be added to in place"
    newest: list[int] = []

    def receive(t: Tensor, g: Array, owned: bool) -> None:
        step = t._step
        if step is None:
            t.accumulate_grad(g, owned)
        elif step.order in waiting:
            _, sofar, mine = waiting[step.order]
            if mine:
                current_backend().dispatch("add_in_place", sofar, g)
            waiting[step.order] = step, (sofar if mine else sofar + g), True
        else:
            waiting[step.order] = step, g, owned
            heapq.heappush(newest, -step.order)

    receive(root, seed, False)
    while newest:
        step, grad, _ = waiting.pop(-heapq.heappop(newest))
        if step.retain is not None and (kept := step.retain()) is not None:
            kept.accumulate_grad(grad, False)
        _check_saved(step)
        grads = _events.backward(step, grad) if recorders else step.backward(grad)
        for t, g in zip(step.inputs, grads if isinstance(grads, tuple) else (grads,), strict=True):
            if g is not None and t.requires_grad:
                g = _fitted(g, t.data)
                receive(t, g, g is not grad and not isinstance(g.base, np.ndarray))
        if not retain_graph:
            step.__dict__.clear()
            step.inputs, step.saved = (), _USED


_USED: tuple[tuple[list[int], int], ...] = (([1], 0),)


def _check_saved(step: Operation) -> None:
    if step.saved is _USED:
        raise GradientError("this graph was already walked by backward(); pass retain_graph=True to walk it again")
    for counter, was in step.saved:
        if counter[0] != was:
            raise GradientError(
                f"a value that {type(step).__name__} needs for its gradient was changed in place since "
                f"({counter[0] - was} change{'s' if counter[0] - was > 1 else ''}); change a copy instead"
            )


def _fitted(g: Array, like: Array) -> Array:
    """The gradient in the shape and dtype of what it belongs to: broadcast axes are summed."""
    if g.shape != like.shape:
        g = g.sum(axis=tuple(range(g.ndim - like.ndim)))
        stretched = tuple(i for i, n in enumerate(like.shape) if n == 1 and g.shape[i] != 1)
        g = np.asarray(g.sum(axis=stretched, keepdims=True) if stretched else g)
    return g if g.dtype == like.dtype else g.astype(like.dtype)
