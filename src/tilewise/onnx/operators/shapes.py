"""ONNX operations that move numbers: reshaping, joining, cutting, repeating, resizing; and the sizes themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise import ops
from tilewise.errors import DtypeError, FileFormatError, ShapeError
from tilewise.nn import functional as F
from tilewise.nn import resampling
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import (
    Value,
    are_constants,
    array,
    axis_of,
    check_size,
    choice,
    computed,
    is_float,
    numbers,
    operator,
    read_values,
    same_type,
    tensor,
)
from tilewise.tensor import Array, Tensor, apply, cat


def _reshaped(x: Value, shape: tuple[int, ...]) -> Value:
    """Reshape x; raise `ShapeError` if the number of elements differs."""
    if math.prod(shape) != math.prod(x.shape):
        raise ShapeError(f"a tensor of shape {x.shape} cannot take the shape {shape}")
    return x.reshape(shape)


@operator("Reshape")
def _reshape(node: OnnxNode, x: Value, shape: Value) -> Value:
    """Reshape; 0 copies the input's size unless `allowzero` is set, and -1 is computed."""
    target = numbers(shape)
    if not node.get("allowzero", 0):
        if any(n == 0 and i >= len(x.shape) for i, n in enumerate(target)):
            raise ShapeError(f"{node} copies a size that a tensor of shape {x.shape} does not have")
        target = [x.shape[i] if n == 0 else n for i, n in enumerate(target)]
    if target.count(-1) > 1 or min(target, default=0) < -1:
        raise ShapeError(f"{node} asks for the shape {tuple(target)}")
    if -1 in target:
        others = math.prod(n for n in target if n != -1)
        target[target.index(-1)] = math.prod(x.shape) // others if others else 0
    return _reshaped(x, tuple(target))


@operator("Flatten")
def _flatten(node: OnnxNode, x: Value) -> Value:
    """Flatten the axes before `axis` into one and the others into another."""
    axis = node.get("axis", 1)
    if not -len(x.shape) <= axis <= len(x.shape):
        raise ShapeError(f"{node} works along axis {axis} of a tensor with {len(x.shape)} dimensions")
    axis = axis + len(x.shape) if axis < 0 else axis
    return _reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Transpose")
def _transpose(node: OnnxNode, x: Value) -> Value:
    """Permute the axes; without `perm`, reverse them."""
    axes = node.get("perm", tuple(range(len(x.shape)))[::-1])
    if sorted(axes) != list(range(len(x.shape))):
        raise ShapeError(f"{node} orders the axes of a tensor of shape {x.shape} as {axes}")
    return x.transpose(axes) if isinstance(x, np.ndarray) else x.permute(*axes)


@operator("Squeeze")
def _squeeze(node: OnnxNode, x: Value, axes: Value | None = None) -> Value:
    """Drop the given axes, which must have size 1; without any, all axes of size 1."""
    selected = [i for i, n in enumerate(x.shape) if n == 1] if axes is None else numbers(axes)
    selected = [axis_of(a, len(x.shape), node) for a in selected]
    if any(x.shape[a] != 1 for a in selected):
        raise ShapeError(f"{node} removes axes {selected} of {x.shape}, which are not of size 1")
    return _reshaped(x, tuple(n for i, n in enumerate(x.shape) if i not in selected))


@operator("Unsqueeze")
def _unsqueeze(node: OnnxNode, x: Value, axes: Value) -> Value:
    """Insert axes of size 1 at the given positions of the result."""
    rank = len(x.shape) + len(numbers(axes))
    selected = {axis_of(a, rank, node) for a in numbers(axes)}
    if len(selected) != rank - len(x.shape):
        raise ShapeError(f"{node} adds an axis twice")
    sizes = iter(x.shape)
    return _reshaped(x, tuple(1 if i in selected else next(sizes) for i in range(rank)))


@operator("Concat")
def _concat(node: OnnxNode, *values: Value) -> Value:
    """Concatenate along an axis; constants stay constants."""
    same_type(node, *values)
    axis = axis_of(node.get("axis", 0), len(values[0].shape), node)
    if not values[0].shape or any(
        len(v.shape) != len(values[0].shape)
        or any(a != b for i, (a, b) in enumerate(zip(v.shape, values[0].shape, strict=True)) if i != axis)
        for v in values
    ):
        raise ShapeError(f"{node} cannot concatenate shapes {', '.join(str(v.shape) for v in values[:8])}")
    total = sum(v.shape[axis] for v in values)
    check_size((*values[0].shape[:axis], total, *values[0].shape[axis + 1 :]), array(values[0]).itemsize)
    if are_constants(*values):
        return np.concatenate(values, axis)
    return cat([tensor(v) for v in values], axis)


@operator("Split")
def _split(node: OnnxNode, x: Value, sizes: Value | None = None) -> Any:
    """Split along an axis into given or equal sizes."""
    axis = axis_of(node.get("axis", 0), len(x.shape), node)
    if not x.shape:
        raise ShapeError(f"{node} cannot slice a scalar")
    total, count = x.shape[axis], len(node.outputs)
    if sizes is not None:
        lengths = numbers(sizes)
    else:
        step = max(-(-total // count), 1)
        lengths = [min(step, max(total - i * step, 0)) for i in range(count)]
    if sum(lengths) != total or min(lengths, default=0) < 0 or len(lengths) != count:
        raise ShapeError(f"{node} cannot split an axis of {total} into {count} parts of {lengths}")
    if isinstance(x, Tensor):
        return tuple(x.split(lengths, axis))
    return tuple(np.split(x, np.cumsum(lengths)[:-1], axis))


@operator("Slice")
def _slice(
    node: OnnxNode, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None
) -> Value:
    """Slice x along `axes` from `starts` to `ends` in `steps`; bounds beyond an axis are clipped."""
    first, last = numbers(starts), numbers(ends)
    along = list(range(len(first))) if axes is None else numbers(axes)
    step = [1] * len(first) if steps is None else numbers(steps)
    if not len(first) == len(last) == len(along) == len(step) or 0 in step:
        raise ShapeError(f"{node} has starts {first}, ends {last}, axes {along} and steps {step}")
    index = [slice(None)] * len(x.shape)
    for a, b, axis, by in zip(first, last, along, step, strict=True):
        axis = axis_of(axis, len(x.shape), node)
        if axis >= len(x.shape):
            raise ShapeError(f"{node} cannot slice a scalar")
        index[axis] = _bounds(a, b, by, x.shape[axis])
    return x[tuple(index)]


def _bounds(start: int, end: int, step: int, size: int) -> slice:
    """Convert ONNX's slice bounds to a Python slice for an axis of this size.

    Bounds are clipped; the end is None for a negative step down to the first entry.
    """
    start = start + size if start < 0 else start
    end = end + size if end < 0 else end
    if step > 0:
        # No end where all is kept, so that the same slice of a larger batch keeps all of it.
        return slice(min(max(start, 0), size), None if end >= size else max(end, 0), step)
    end = min(max(end, -1), size - 1)
    return slice(min(max(start, 0), size - 1), None if end < 0 else end, step) if size else slice(0, 0)


@operator("Expand")
def _expand(node: OnnxNode, x: Value, shape: Value) -> Value:
    """Broadcast x and `shape` against each other."""
    try:
        target = np.broadcast_shapes(x.shape, tuple(numbers(shape)))
    except ValueError:
        raise ShapeError(f"{node} cannot broadcast {x.shape} to {numbers(shape)}") from None
    check_size(target, array(x).itemsize)
    return np.broadcast_to(x, target) if isinstance(x, np.ndarray) else x.expand(*target)


@operator("Tile")
def _tile(node: OnnxNode, x: Value, repeats: Value) -> Value:
    """Repeat x along each axis as often as `repeats` says."""
    times = numbers(repeats)
    if len(times) != len(x.shape) or min(times, default=0) < 0:
        raise ShapeError(f"{node} repeats a tensor of shape {x.shape} {times} times")
    check_size([n * t for n, t in zip(x.shape, times, strict=True)], array(x).itemsize)
    if are_constants(x):
        return np.tile(array(x), times)
    return _gathered(tensor(x), [np.tile(np.arange(n), t) for n, t in zip(x.shape, times, strict=True)])


def _gathered(x: Value, where: list[Array]) -> Value:
    """Select entries by index arrays, one per axis; unchanged leading axes work for any batch size."""
    unchanged = [np.array_equal(w, np.arange(n)) for n, w in zip(x.shape, where, strict=True)]
    first = unchanged.index(False) if False in unchanged else None
    return x if first is None else x[(slice(None),) * first + np.ix_(*where[first:])]


@operator("Pad")
def _pad(node: OnnxNode, x: Value, pads: Value, value: Value | None = None, axes: Value | None = None) -> Value:
    """Pad x by `pads` with a constant value, or with its own entries (reflect, edge, wrap), as the node's mode says."""
    mode = choice(node, "mode", "constant", ("constant", "edge", "reflect", "wrap"))
    along = list(range(len(x.shape))) if axes is None else [axis_of(a, len(x.shape), node) for a in numbers(axes)]
    widths_list = numbers(pads)
    if len(widths_list) != 2 * len(along) or len(set(along)) != len(along):
        raise ShapeError(f"{node} pads a tensor of shape {x.shape} by {widths_list}")
    widths = [(0, 0)] * len(x.shape)
    for i, axis in enumerate(along):
        widths[axis] = (widths_list[i], widths_list[i + len(along)])
    check_size([n + a + b for n, (a, b) in zip(x.shape, widths, strict=True)], array(x).itemsize)
    if any(min(a, b) < 0 for a, b in widths):
        # Negative widths crop. Axes that keep their size must follow other batches: no fixed end for them.
        x = x[tuple(slice(max(-a, 0), min(b, 0) or None) for a, b in widths)]
    widths = [(max(a, 0), max(b, 0)) for a, b in widths]
    fill = 0.0 if value is None else read_values(value).reshape(()).item()
    return _padded(x, widths, mode, fill, node)


def _padded(x: Value, widths: list[tuple[int, int]], mode: str, fill: Any, node: OnnxNode) -> Value:
    """Pad x by (before, after) elements per axis: with `fill`, or by NumPy's `mode` (reflect, edge, wrap)."""
    if mode == "constant" and not are_constants(x):
        return tensor(x).pad(widths, fill)
    if mode == "constant":
        return np.pad(array(x), widths, constant_values=fill)
    if any(n == 0 and (a or b) for n, (a, b) in zip(x.shape, widths, strict=True)):
        raise ShapeError(f"{node} has nothing to repeat in a tensor of shape {x.shape}")
    where = [np.pad(np.arange(n), w, mode=mode) for n, w in zip(x.shape, widths, strict=True)]  # type: ignore[call-overload]
    return _gathered(x, where)


# --- shapes as values, and tensors created from them ---


@operator("Shape")
def _shape(node: OnnxNode, x: Value) -> Value:
    return np.array(x.shape[slice(node.get("start", 0), node.attributes.get("end"))], np.int64)


@operator("Size")
def _size(_node: OnnxNode, x: Value) -> Value:
    return np.array(math.prod(x.shape), np.int64)


@operator("ConstantOfShape")
def _constant_of_shape(node: OnnxNode, shape: Value) -> Value:
    """Fill a tensor of the given shape with the node's value, 0 by default."""
    value = node.attributes.get("value", np.zeros(1, np.float32))
    if not isinstance(value, np.ndarray) or value.size != 1:
        raise FileFormatError(f"{node} fills with something other than one number")
    return np.full(check_size(numbers(shape), value.itemsize), value.reshape(()))


@operator("Range")
def _range(node: OnnxNode, start: Value, limit: Value, step: Value) -> Value:
    """Return the numbers from start up to, but not including, limit, in steps of `step`."""
    same_type(node, start, limit, step)
    a, b, by = (read_values(v).reshape(()).item() for v in (start, limit, step))
    if by == 0 or not all(map(math.isfinite, (a, b, by))):
        raise ShapeError(f"{node} cannot count from {a} to {b} in steps of {by}")
    count = max(math.ceil((b - a) / by), 0)
    check_size((count,), 8)
    return np.asarray((a + np.arange(count) * by).astype(array(start).dtype))


@operator("EyeLike")
def _eye_like(node: OnnxNode, x: Value) -> Value:
    """Return a matrix of the shape of x with ones on the k-th diagonal and zeros elsewhere."""
    from tilewise.onnx.reader import dtype_of

    if len(x.shape) != 2:
        raise ShapeError(f"{node} takes a matrix, not a tensor of shape {x.shape}")
    dtype = dtype_of(node.get("dtype", 0), node) if "dtype" in node.attributes else array(x).dtype
    return np.eye(x.shape[0], x.shape[1], k=node.get("k", 0), dtype=dtype)


@operator("OneHot")
def _one_hot(node: OnnxNode, indices: Value, depth: Value, values: Value) -> Value:
    """Encode indices as vectors of size `depth` along a new axis; `values` are (off, on)."""
    size, (off, on) = int(read_values(depth).reshape(()).item()), read_values(values).reshape(2)
    axis = axis_of(node.get("axis", -1), len(indices.shape) + 1, node)
    check_size((*indices.shape, size), array(values).itemsize)
    return computed(lambda a: _one_hot_of(a, size, off, on, axis), indices, name=node.op)


def _one_hot_of(indices: Array, size: int, off: Any, on: Any, axis: int) -> Array:
    """Encode integer indices as one-hot vectors along a new axis; negative ones count from the end."""
    where = np.expand_dims(np.where(indices < 0, indices + size, indices), axis)
    classes = np.arange(size).reshape([-1 if i == axis else 1 for i in range(where.ndim)])
    return np.asarray(np.where(where == classes, on, off))


@operator("Trilu")
def _trilu(node: OnnxNode, x: Value, k: Value | None = None) -> Value:
    """Keep the upper or lower triangle of each matrix from the k-th diagonal on; the others become zeros."""
    if len(x.shape) < 2:
        raise ShapeError(f"{node} takes matrices, not a tensor of shape {x.shape}")
    shift = 0 if k is None else int(read_values(k).reshape(()).item())
    triangle = np.triu if node.get("upper", 1) else np.tril
    mask = triangle(np.ones(x.shape[-2:], bool), int(np.clip(shift, -(1 << 31), 1 << 31)))
    if isinstance(x, Tensor) and array(x).dtype.kind == "f":
        return x.masked_fill(~mask, 0.0)
    return computed(lambda a: np.where(mask, a, np.zeros((), a.dtype)), x, name=node.op)


@operator("NonZero")
def _non_zero(node: OnnxNode, x: Value) -> Value:
    check_size((len(x.shape), math.prod(x.shape)), 8)
    return computed(lambda a: np.array(np.nonzero(a), np.int64).reshape(a.ndim, -1), x, name=node.op)


@operator("DepthToSpace")
def _depth_to_space(node: OnnxNode, x: Value) -> Value:
    """Move channels into blocks of size x size pixels: (N, C·size², H, W) becomes (N, C, H·size, W·size)."""
    size = node.get("blocksize", 1)
    n, c, h, w = _image(node, x, size, c_by=size * size)
    mode = choice(node, "mode", "DCR", ("DCR", "CRD"))
    t = tensor(x)
    if mode == "DCR":
        t = t.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        t = t.reshape(n, c // size**2, size, size, h, w).permute(0, 1, 4, 2, 5, 3)
    return t.reshape(n, c // size**2, h * size, w * size)


@operator("SpaceToDepth")
def _space_to_depth(node: OnnxNode, x: Value) -> Value:
    """Move blocks of size x size pixels into channels: (N, C, H, W) becomes (N, C·size², H/size, W/size)."""
    size = node.get("blocksize", 1)
    n, c, h, w = _image(node, x, size, side_by=size)
    order = (0, 3, 5, 1, 2, 4) if choice(node, "mode", "DCR", ("DCR", "CRD")) == "DCR" else (0, 1, 3, 5, 2, 4)
    t = tensor(x).reshape(n, c, h // size, size, w // size, size).permute(*order)
    return t.reshape(n, c * size * size, h // size, w // size)


def _image(node: OnnxNode, x: Value, size: int, c_by: int = 1, side_by: int = 1) -> tuple[int, ...]:
    """Return x's shape (N, C, H, W); ShapeError unless the channels are divisible by c_by, the sides by side_by."""
    if size < 1 or len(x.shape) != 4 or x.shape[1] % c_by or x.shape[2] % side_by or x.shape[3] % side_by:
        raise ShapeError(f"{node} cannot use blocks of {size} in a tensor of shape {x.shape}")
    return x.shape


# --- lookup by index ---


@operator("Gather")
def _gather(node: OnnxNode, x: Value, indices: Value) -> Value:
    """Look up entries along an axis; the indices may be computed."""
    axis, where = axis_of(node.get("axis", 0), len(x.shape), node), array(indices)
    if where.dtype.kind not in "iu" or not x.shape:
        raise DtypeError(f"{node} looks up {where.dtype} in a tensor of shape {x.shape}")
    check_size((*x.shape[:axis], *where.shape, *x.shape[axis + 1 :]), array(x).itemsize)
    places = _inside(where, x.shape[axis], node)
    if are_constants(x, indices):
        return np.asarray(array(x).take(places, axis))
    if axis == 0 and len(x.shape) == 2 and isinstance(x, Tensor):
        return F.embedding(places, x) if are_constants(indices) else apply(Lookup, x, tensor(indices))
    if are_constants(indices):
        return tensor(x)[(*(slice(None),) * axis, places)]
    return apply(Lookup, tensor(x), tensor(indices), axis=axis)


def _inside(where: Array, size: int, node: object) -> Array:
    """Convert negative positions to non-negative ones; raise if one is outside of the axis."""
    if where.size and (int(where.min()) < -size or int(where.max()) >= size):
        raise ShapeError(f"{node} looks up position {int(where.max())} or {int(where.min())} of {size}")
    return np.where(where < 0, where + size, where).astype(np.intp)


def _along(axis: int, where: Array) -> Any:
    """Return the index tuple that selects positions `where` along one axis."""
    return (*(slice(None),) * axis, where)


class Lookup(ops.Operation):
    """Operation that selects entries of an axis by positions that depend on the network's input."""

    def forward(self, x: Array, where: Array, *, axis: int = 0) -> Array:
        """Take the elements at positions `where` along an axis; negative positions count from the end."""
        self.shape, self.axis = x.shape, axis
        self.where = _inside(where, x.shape[axis], "a lookup")
        return np.asarray(x.take(self.where, axis))

    def backward(self, grad: Array) -> Any:
        """Add the gradient of each element to the position it was taken from."""
        g = np.zeros(self.shape, grad.dtype)
        np.add.at(g, _along(self.axis, self.where), grad)
        return g, None


@operator("GatherElements")
def _gather_elements(node: OnnxNode, x: Value, indices: Value) -> Value:
    """Look up one entry per index along an axis."""
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
    """Look up entries or slices by index tuples."""
    where, batch = read_values(indices), node.get("batch_dims", 0)
    if where.dtype.kind not in "iu" or not where.ndim or not 0 < where.shape[-1] <= len(x.shape) - batch:
        raise ShapeError(f"{node} looks up {where.dtype} of shape {where.shape} in a tensor of shape {x.shape}")
    if not 0 <= batch < min(where.ndim, len(x.shape)) or where.shape[:batch] != x.shape[:batch]:
        raise ShapeError(f"{node} shares {batch} axes of {where.shape} and {x.shape}")
    check_size((*where.shape[:-1], *x.shape[batch + where.shape[-1] :]), array(x).itemsize)
    places = tuple(_inside(where[..., i], x.shape[batch + i], node) for i in range(where.shape[-1]))
    lead = tuple(
        np.arange(n).reshape([-1 if j == i else 1 for j in range(where.ndim - 1)])
        for i, n in enumerate(where.shape[:batch])
    )
    return array(x)[lead + places] if are_constants(x, indices) else tensor(x)[lead + places]


@operator("ScatterND")
def _scatter_nd(node: OnnxNode, x: Value, indices: Value, updates: Value) -> Value:
    """Write (or add, multiply, ...) updates into a copy of x; the last axis of `indices` holds coordinates."""
    where = read_values(indices)
    if where.dtype.kind not in "iu" or not where.ndim or where.shape[-1] > len(x.shape):
        raise ShapeError(f"{node} writes at {where.dtype} of shape {where.shape} in a tensor of shape {x.shape}")
    if tuple(updates.shape) != (*where.shape[:-1], *x.shape[where.shape[-1] :]):
        raise ShapeError(f"{node} writes {updates.shape} at {where.shape} in a tensor of shape {x.shape}")
    places = tuple(_inside(where[..., i], x.shape[i], node) for i in range(where.shape[-1]))
    how = choice(node, "reduction", "none", ("none", "add", "mul", "max", "min"))
    return computed(lambda a, b: _scatter(a, places, b, how), x, updates, name=node.op)


@operator("ScatterElements")
def _scatter_elements(node: OnnxNode, x: Value, indices: Value, updates: Value) -> Value:
    """Write (or add, multiply, ...) updates into a copy of x; `indices` replaces their positions along `axis`."""
    axis, where = axis_of(node.get("axis", 0), len(x.shape), node), read_values(indices)
    if where.dtype.kind not in "iu" or where.ndim != len(x.shape) or where.shape != tuple(updates.shape):
        raise ShapeError(f"{node} writes {updates.shape} at {where.shape} in a tensor of shape {x.shape}")
    places: list[Any] = list(np.ix_(*(np.arange(n) for n in where.shape)))
    places[axis] = _inside(where, x.shape[axis], node)
    how = choice(node, "reduction", "none", ("none", "add", "mul", "max", "min"))
    return computed(lambda a, b: _scatter(a, tuple(places), b, how), x, updates, name=node.op)


_WRITES: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(x: Array, places: tuple[Any, ...], updates: Array, how: str) -> Array:
    """Return a copy of x with updates written to, or combined by `how` (add, mul, ...) with, elements `places`."""
    out = x.copy()
    if how == "none":
        out[places] = updates
        return out
    _WRITES[how].at(out, places, updates)
    return out


# --- resizing: each axis on its own, by the nearest entry, two neighbours or four ---

_COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


@operator("Resize")
def _resize(
    node: OnnxNode, x: Value, roi: Value | None = None, scales: Value | None = None, sizes: Value | None = None
) -> Value:
    """Resize the axes that the node names, one after the other, to `sizes` or by `scales`."""
    mode = choice(node, "mode", "nearest", ("nearest", "linear", "cubic"))
    choice(node, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    if node.get("antialias", 0) or not is_float(x):
        raise DtypeError(f"{node} resizes {array(x).dtype}, or antialiases, which tilewise does not support")
    axes = [a + len(x.shape) if a < 0 else a for a in node.get("axes", tuple(range(len(x.shape))))]
    target_sizes = _target_sizes(node, x, axes, scales, sizes)
    shape = list(x.shape)
    for axis, size, _ in target_sizes:
        shape[axis] = size
    check_size(shape, array(x).itemsize)
    result = tensor(x)
    for axis, size, scale in target_sizes:
        if size != result.shape[axis] or scale != 1:
            result = apply(resampling.Resample, result, taps=_taps(node, mode, x.shape[axis], size, scale), axis=axis)
    return result


def _target_sizes(
    node: OnnxNode, x: Value, axes: list[int], scales: Value | None, sizes: Value | None
) -> list[tuple[int, int, float]]:
    """Return (axis, new size, scale) for each axis to resize."""
    factors = None if scales is None or not scales.shape[0] else read_values(scales)
    if any(not 0 <= a < len(x.shape) for a in axes) or len(set(axes)) != len(axes) or 0 in x.shape:
        raise ShapeError(f"{node} resizes axes {axes} of a tensor of shape {x.shape}")
    if factors is not None:
        if factors.ndim != 1 or len(factors) != len(axes) or not np.isfinite(factors).all() or (factors <= 0).any():
            raise ShapeError(f"{node} has scales of shape {factors.shape} for {len(axes)} axes, or odd ones")
        return [(a, max(math.floor(x.shape[a] * float(f)), 0), float(f)) for a, f in zip(axes, factors, strict=True)]
    target_sizes = [] if sizes is None else numbers(sizes)
    if len(target_sizes) != len(axes) or min(target_sizes, default=0) < 1:
        raise ShapeError(f"{node} has neither scales nor sizes for its {len(axes)} axes")
    policy = choice(node, "keep_aspect_ratio_policy", "stretch", ("stretch", "not_larger", "not_smaller"))
    if policy == "stretch":
        return [(a, n, n / x.shape[a]) for a, n in zip(axes, target_sizes, strict=True)]
    pick = min if policy == "not_larger" else max
    scale = pick(n / x.shape[a] for a, n in zip(axes, target_sizes, strict=True))
    return [(a, math.floor(x.shape[a] * scale + 0.5), scale) for a in axes]


def _taps(node: OnnxNode, mode: str, size: int, target: int, scale: float) -> resampling.Taps:
    """Return the input positions and weights of every output position when resizing one axis."""
    out = np.arange(target, dtype=np.float64)
    how = node.get("coordinate_transformation_mode", "half_pixel")
    if how == "align_corners":
        places = out * ((size - 1) / (target - 1)) if target > 1 else np.zeros(target)
    elif how == "asymmetric":
        places = out / scale
    elif how == "half_pixel_symmetric":
        adjust = target / (scale * size)
        places = size / 2 * (1 - adjust) + (out + 0.5) / scale - 0.5
    elif how == "pytorch_half_pixel" and target == 1:
        places = np.zeros(1)
    else:
        places = (out + 0.5) / scale - 0.5
    if mode == "linear":
        return resampling.linear_taps(places, size)
    if mode == "cubic":
        leave_out = bool(node.get("exclude_outside", 0))
        return resampling.cubic_taps(places, size, node.get("cubic_coeff_a", -0.75), leave_out)
    return resampling.nearest_taps(_nearest(node, places), size)


def _nearest(node: OnnxNode, places: Any) -> Any:
    """Round fractional positions by the node's `nearest_mode`."""
    kinds = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    kind = choice(node, "nearest_mode", "round_prefer_floor", kinds)
    if kind == "floor":
        return np.floor(places)
    if kind == "ceil":
        return np.ceil(places)
    return np.ceil(places - 0.5) if kind == "round_prefer_floor" else np.floor(places + 0.5)
