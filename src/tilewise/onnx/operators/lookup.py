"""ONNX operations that read and write by position: gathering and scattering."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import ops
from tilewise.errors import DtypeError, ShapeError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import (
    Array,
    Value,
    are_constants,
    array,
    axis_of,
    choice,
    computed,
    operator,
    read_values,
    room,
    tensor,
)
from tilewise.tensor import Tensor, apply


@operator("Gather")
def _gather(node: OnnxNode, x: Value, indices: Value) -> Value:
    axis, where = axis_of(node.get("axis", 0), len(x.shape), node), array(indices)
    if where.dtype.kind not in "iu" or not x.shape:
        raise DtypeError(f"{node} looks up {where.dtype} in a tensor of shape {x.shape}")
    room((*x.shape[:axis], *where.shape, *x.shape[axis + 1 :]), array(x).itemsize)
    places = _inside(where, x.shape[axis], node)
    if are_constants(x, indices):
        return np.asarray(array(x).take(places, axis))
    if axis == 0 and len(x.shape) == 2 and isinstance(x, Tensor):
        return F.embedding(places, x) if are_constants(indices) else apply(Lookup, x, tensor(indices))
    if are_constants(indices):
        return tensor(x)[(*(slice(None),) * axis, places)]
    return apply(Lookup, tensor(x), tensor(indices), axis=axis)


def _inside(where: Array, size: int, node: object) -> Array:
    """Positions counted from the front; one outside is an error."""
    if where.size and (int(where.min()) < -size or int(where.max()) >= size):
        raise ShapeError(f"{node} looks up position {int(where.max())} or {int(where.min())} of {size}")
    return np.where(where < 0, where + size, where).astype(np.intp)


def _along(axis: int, where: Array) -> Any:
    """An index of positions along one axis."""
    return (*(slice(None),) * axis, where)


class Lookup(ops.Operation):
    """Entries of an axis by positions that are computed too."""

    def forward(self, x: Array, where: Array, *, axis: int = 0) -> Array:
        self.shape, self.axis = x.shape, axis
        self.where = _inside(where, x.shape[axis], "a lookup")
        return np.asarray(x.take(self.where, axis))

    def backward(self, grad: Array) -> Any:
        g = np.zeros(self.shape, grad.dtype)
        np.add.at(g, _along(self.axis, self.where), grad)
        return g, None


@operator("GatherElements")
def _gather_elements(node: OnnxNode, x: Value, indices: Value) -> Value:
    axis, where = axis_of(node.get("axis", 0), len(x.shape), node), read_values(indices)
    if where.dtype.kind not in "iu" or where.ndim != len(x.shape):
        raise ShapeError(f"{node} looks up {where.dtype} of shape {where.shape} in a tensor of shape {x.shape}")
    if any(a > b for i, (a, b) in enumerate(zip(where.shape, x.shape, strict=True)) if i != axis):
        raise ShapeError(f"{node} looks up {where.shape} in a tensor of shape {x.shape}")
    places = _inside(where, x.shape[axis], node)
    cut = tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(where.shape))
    if are_constants(x, indices):
        return np.take_along_axis(array(x)[cut], places, axis)
    return tensor(x)[cut].gather(axis, places)


@operator("GatherND")
def _gather_nd(node: OnnxNode, x: Value, indices: Value) -> Value:
    where, batch = read_values(indices), node.get("batch_dims", 0)
    if where.dtype.kind not in "iu" or not where.ndim or not 0 < where.shape[-1] <= len(x.shape) - batch:
        raise ShapeError(f"{node} looks up {where.dtype} of shape {where.shape} in a tensor of shape {x.shape}")
    if not 0 <= batch < min(where.ndim, len(x.shape)) or where.shape[:batch] != x.shape[:batch]:
        raise ShapeError(f"{node} shares {batch} axes of {where.shape} and {x.shape}")
    room((*where.shape[:-1], *x.shape[batch + where.shape[-1] :]), array(x).itemsize)
    places = tuple(_inside(where[..., i], x.shape[batch + i], node) for i in range(where.shape[-1]))
    lead = tuple(
        np.arange(n).reshape([-1 if j == i else 1 for j in range(where.ndim - 1)])
        for i, n in enumerate(where.shape[:batch])
    )
    return array(x)[lead + places] if are_constants(x, indices) else tensor(x)[lead + places]


@operator("ScatterND")
def _scatter_nd(node: OnnxNode, x: Value, indices: Value, updates: Value) -> Value:
    where = read_values(indices)
    if where.dtype.kind not in "iu" or not where.ndim or where.shape[-1] > len(x.shape):
        raise ShapeError(f"{node} writes at {where.dtype} of shape {where.shape} in a tensor of shape {x.shape}")
    if tuple(updates.shape) != (*where.shape[:-1], *x.shape[where.shape[-1] :]):
        raise ShapeError(f"{node} writes {updates.shape} at {where.shape} in a tensor of shape {x.shape}")
    places = tuple(_inside(where[..., i], x.shape[i], node) for i in range(where.shape[-1]))
    how = choice(node, "reduction", "none", ("none", "add", "mul", "max", "min"))
    return computed(lambda a, b: _written(a, places, b, how), x, updates, name=node.op)


@operator("ScatterElements")
def _scatter_elements(node: OnnxNode, x: Value, indices: Value, updates: Value) -> Value:
    axis, where = axis_of(node.get("axis", 0), len(x.shape), node), read_values(indices)
    if where.dtype.kind not in "iu" or where.ndim != len(x.shape) or where.shape != tuple(updates.shape):
        raise ShapeError(f"{node} writes {updates.shape} at {where.shape} in a tensor of shape {x.shape}")
    places: list[Any] = list(np.ix_(*(np.arange(n) for n in where.shape)))
    places[axis] = _inside(where, x.shape[axis], node)
    how = choice(node, "reduction", "none", ("none", "add", "mul", "max", "min"))
    return computed(lambda a, b: _written(a, tuple(places), b, how), x, updates, name=node.op)


_WRITES: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _written(x: Array, places: tuple[Any, ...], updates: Array, how: str) -> Array:
    out = x.copy()
    if how == "none":
        out[places] = updates
        return out
    _WRITES[how].at(out, places, updates)
    return out
