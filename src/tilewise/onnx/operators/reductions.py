"""ONNX operations along axes: sums, means, extremes, softmax, sorting; and products of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.errors import DtypeError, FileFormatError, ShapeError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import (
    Value,
    are_constants,
    array,
    axis_of,
    check_size,
    computed,
    is_float,
    numbers,
    operator,
    read_values,
    same_type,
    tensor,
)
from tilewise.tensor import Array, Tensor

Axes = tuple[int, ...]


def _log_sum_exp(x: Tensor, axes: Axes) -> Tensor:
    top = np.where(np.isfinite(m := x.data.max(axis=axes, keepdims=True)), m, 0).astype(x.dtype)
    return (x - Tensor(top)).exp().sum(axes, True).log() + Tensor(top)


_REDUCTIONS: dict[str, Callable[[Tensor, Axes], Tensor]] = {
    "ReduceSum": lambda x, axes: x.sum(axes, True),
    "ReduceMean": lambda x, axes: x.mean(axes, True),
    "ReduceMax": lambda x, axes: x.max(axes, True),
    "ReduceMin": lambda x, axes: x.min(axes, True),
    "ReduceL1": lambda x, axes: abs(x).sum(axes, True),
    "ReduceL2": lambda x, axes: (x * x).sum(axes, True).sqrt(),
    "ReduceSumSquare": lambda x, axes: (x * x).sum(axes, True),
    "ReduceLogSum": lambda x, axes: x.sum(axes, True).log(),
    "ReduceLogSumExp": _log_sum_exp,
}
_OF_INTEGERS: dict[str, Callable[..., Array]] = {
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
}


@operator(*_REDUCTIONS, "ReduceProd")
def _reduce(node: OnnxNode, x: Value, axes: Value | None = None) -> Value:
    """Reduce along the axes of the node: with a gradient for floats, by NumPy for integers and constants."""
    selected = numbers(axes) if axes is not None else list(node.get("axes", ()))
    if not selected and node.get("noop_with_empty_axes", 0):
        return x
    along = tuple(sorted({axis_of(a, len(x.shape), node) for a in selected})) or tuple(range(len(x.shape)))
    along = along if x.shape else ()
    keep = bool(node.get("keepdims", 1))
    shape = tuple(1 if i in along else n for i, n in enumerate(x.shape))
    if not math.prod(x.shape) and node.op in ("ReduceMax", "ReduceMin", "ReduceMean"):
        raise ShapeError(f"{node} has nothing to work on in a tensor of shape {x.shape}")
    if are_constants(x) or not is_float(x) or node.op == "ReduceProd":
        result = _reduced_array(node, x, along)
    else:
        result = _REDUCTIONS[node.op](tensor(x), along)
    return result if keep else result.reshape(tuple(n for i, n in enumerate(shape) if i not in along))


def _reduced_array(node: OnnxNode, x: Value, along: Axes) -> Value:
    """Reduce a constant or integer array along the axes `along`, which keep size 1."""
    if node.op in _OF_INTEGERS:
        function = _OF_INTEGERS[node.op]
        return computed(lambda a: function(a, axis=along, keepdims=True).astype(a.dtype), x, name=node.op)
    reduction = _REDUCTIONS[node.op]
    return computed(lambda a: reduction(Tensor(a), along).data.astype(a.dtype), x, name=node.op)


@operator("ArgMax", "ArgMin")
def _arg(node: OnnxNode, x: Value) -> Value:
    """Return the index of the largest (ArgMax) or smallest (ArgMin) entry along an axis."""
    axis, keep = axis_of(node.get("axis", 0), len(x.shape), node), bool(node.get("keepdims", 1))
    last = node.get("select_last_index", 0)
    find = np.argmax if node.op == "ArgMax" else np.argmin
    if not x.shape or not math.prod(x.shape):
        raise ShapeError(f"{node} has nothing to find in a tensor of shape {x.shape}")

    def run(a: Array) -> Array:
        if last:
            return np.asarray(a.shape[axis] - 1 - find(np.flip(a, axis), axis=axis, keepdims=keep), np.int64)
        return np.asarray(find(a, axis=axis, keepdims=keep), np.int64)

    return computed(run, x, name=node.op)


@operator("Softmax", "LogSoftmax")
def _softmax(node: OnnxNode, x: Value) -> Value:
    """Compute Softmax or LogSoftmax along the node's axis."""
    axis = axis_of(node.get("axis", -1), len(x.shape), node)
    if not is_float(x):
        raise DtypeError(f"{node} takes floating-point numbers, not {array(x).dtype}")
    return tensor(x).softmax(axis) if node.op == "Softmax" else tensor(x).log_softmax(axis)


@operator("CumSum")
def _cumsum(node: OnnxNode, x: Value, axis: Value) -> Value:
    """Sum cumulatively along an axis, optionally from the end or without the entry itself."""
    along = axis_of(int(read_values(axis).reshape(()).item()), len(x.shape), node)
    exclusive, reverse = node.get("exclusive", 0), node.get("reverse", 0)
    if not x.shape:
        raise ShapeError(f"{node} has no axis to sum along")

    def run(a: Array) -> Array:
        """Sum an array cumulatively with the node's settings."""
        a = np.flip(a, along) if reverse else a
        total = np.cumsum(a, along, dtype=a.dtype)
        total = total - a if exclusive else total
        return np.flip(total, along) if reverse else total

    if isinstance(x, Tensor) and is_float(x) and not exclusive and not reverse:
        return x.cumsum(along)
    return computed(run, x, name=node.op)


@operator("TopK")
def _top_k(node: OnnxNode, x: Value, k: Value) -> Any:
    """Return the k largest or smallest entries along an axis, and their positions."""
    axis, count = axis_of(node.get("axis", -1), len(x.shape), node), int(read_values(k).reshape(()).item())
    if not x.shape or not 0 <= count <= x.shape[axis]:
        raise ShapeError(f"{node} asks for the first {count} of a tensor of shape {x.shape}")
    data = read_values(x)
    keys = -data if node.get("largest", 1) and data.dtype.kind in "f" else data
    if node.get("largest", 1) and data.dtype.kind != "f":
        keys = np.max(data, initial=0) - data.astype(np.int64)
    order = np.argsort(keys, axis, kind="stable").take(np.arange(count), axis)
    if isinstance(x, Tensor):
        return x.gather(axis, order), Tensor(order.astype(np.int64))
    return np.take_along_axis(data, order, axis), order.astype(np.int64)


# --- products ---


@operator("MatMul")
def _matmul(node: OnnxNode, a: Value, b: Value) -> Value:
    """Multiply matrices: with a gradient for floats, by NumPy for integers and constants."""
    same_type(node, a, b)
    if not a.shape or not b.shape or a.shape[-1] != b.shape[-2 if len(b.shape) > 1 else 0]:
        raise ShapeError(f"{node} cannot multiply shapes {a.shape} and {b.shape}")
    try:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ShapeError(f"{node} cannot multiply shapes {a.shape} and {b.shape}") from None
    check_size((*lead, *a.shape[-2:-1], *(b.shape[-1:] if len(b.shape) > 1 else ())))
    if not is_float(a, b):
        return computed(np.matmul, a, b, name=node.op)
    return tensor(a) @ tensor(b)


@operator("Gemm")
def _gemm(node: OnnxNode, a: Value, b: Value, c: Value | None = None) -> Value:
    """Compute alpha A' B' + beta C, where A' and B' may be transposed."""
    same_type(node, a, b)
    if len(a.shape) != 2 or len(b.shape) != 2 or not is_float(a, b):
        raise ShapeError(f"{node} multiplies matrices of floats, not shapes {a.shape} and {b.shape}")
    first = tensor(a).T if node.get("transA", 0) else tensor(a)
    right = tensor(b).T if node.get("transB", 0) else tensor(b)
    check_size((first.shape[0], right.shape[1]))
    product = first @ right
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    product = product if alpha == 1 else product * alpha
    if c is None or beta == 0:
        return product
    same_type(node, a, c)
    if np.broadcast_shapes(product.shape, c.shape) != product.shape:
        raise ShapeError(f"{node} cannot add {c.shape} to {product.shape}")
    return product + (tensor(c) if beta == 1 else tensor(c) * beta)


@operator("Einsum")
def _einsum(node: OnnxNode, *values: Value) -> Value:
    """Compute an einsum of one or two tensors by a matrix product; letters only, none twice in a term."""
    terms, out = _einsum_terms(node, values)
    result, letters = tensor(values[0]), terms[0]
    for index, value in enumerate(values[1:], 1):
        later = set(out).union(*terms[index + 1 :])
        result, letters = _contract(node, result, letters, tensor(value), terms[index], later)
    summed_axes = tuple(i for i, letter in enumerate(letters) if letter not in out)
    result = result.sum(summed_axes) if summed_axes else result
    remaining = [letter for letter in letters if letter in out]
    return result.permute(*(remaining.index(letter) for letter in out)) if out else result.reshape(())


def _einsum_terms(node: OnnxNode, values: tuple[Value, ...]) -> tuple[list[str], str]:
    """Return the axis letters of each operand, and of the result, from the node's equation."""
    equation = node.get("equation", "").replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        joined = "".join(terms)
        out = "".join(sorted(letter for letter in set(joined) if joined.count(letter) == 1))
    plain = all((term.isalpha() and len(set(term)) == len(term)) or not term for term in terms)
    if not plain or len(terms) != len(values) or not set(out) <= set("".join(terms)) or len(set(out)) != len(out):
        raise FileFormatError(f"{node} has the equation {equation[:60]!r}, which tilewise does not compute")
    if any(len(term) != len(value.shape) for term, value in zip(terms, values, strict=True)) or not is_float(*values):
        raise ShapeError(f"{node}: {equation[:60]!r} does not fit the shapes {', '.join(str(v.shape) for v in values)}")
    return terms, out


def _contract(node: OnnxNode, a: Tensor, ta: str, b: Tensor, tb: str, later: set[str]) -> tuple[Tensor, str]:
    """Contract two tensors of an einsum, whose axes have the letters `ta` and `tb`, over the letters in both.

    Common letters in `later`, which are needed afterwards, become batch axes; the others are summed. Returns the result
    and its letters.
    """
    sizes = dict(zip(ta, a.shape, strict=True))
    if any(sizes.get(letter, n) != n for letter, n in zip(tb, b.shape, strict=True)):
        raise ShapeError(f"{node}: sizes of shared letters differ, {a.shape} and {b.shape}")
    sizes |= dict(zip(tb, b.shape, strict=True))
    batch = [x for x in ta if x in tb and x in later]
    summed = [x for x in ta if x in tb and x not in later]
    rows, columns = [x for x in ta if x not in tb], [x for x in tb if x not in ta]
    shape = [sizes[x] for x in (*batch, *rows, *columns)]
    check_size(shape)
    lead, inner = [sizes[x] for x in batch], math.prod(sizes[x] for x in summed)
    rows_matrix = a.permute(*(ta.index(x) for x in (*batch, *rows, *summed)))
    right = b.permute(*(tb.index(x) for x in (*batch, *summed, *columns)))
    rows_matrix = rows_matrix.reshape(*lead, math.prod(sizes[x] for x in rows), inner)
    right = right.reshape(*lead, inner, math.prod(sizes[x] for x in columns))
    return (rows_matrix @ right).reshape(*shape), "".join((*batch, *rows, *columns))


# --- norms ---


@operator("BatchNormalization")
def _batch_norm(node: OnnxNode, x: Value, weight: Value, bias: Value, mean: Value, var: Value) -> Any:
    """Normalize each channel by the stored mean and variance, scale and shift it; training mode is unsupported."""
    if not is_float(x, weight, bias, mean, var) or mean.shape != weight.shape or var.shape != weight.shape:
        raise ShapeError(f"{node} has statistics of shape {mean.shape} and a weight of shape {weight.shape}")
    eps, old = node.get("epsilon", 1e-5), (tensor(mean), tensor(var))
    if not node.get("training_mode", 0):
        return F.batch_norm(tensor(x), *old, tensor(weight), tensor(bias), eps=eps)
    result = F.batch_norm(tensor(x), None, None, tensor(weight), tensor(bias), eps=eps)  # as weights are standardised
    if len(node.outputs) == 1:
        return result
    axes, momentum = tuple(a for a in range(len(x.shape)) if a != 1), node.get("momentum", 0.9)
    statistics = tensor(x).mean(axes), tensor(x).var(axes, correction=0)
    return result, *(before * momentum + now * (1 - momentum) for before, now in zip(old, statistics, strict=True))


@operator("LayerNormalization")
def _layer_norm(node: OnnxNode, x: Value, weight: Value, bias: Value | None = None) -> Any:
    """Normalize over the axes from `axis` on, scale by weight and add bias; return mean and 1/deviation if asked."""
    axis = node.get("axis", -1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis < len(x.shape) or not is_float(x, weight):
        raise ShapeError(f"{node} normalises axis {axis} of {array(x).dtype} of shape {x.shape}")
    inner, eps = tuple(x.shape[axis:]), node.get("epsilon", 1e-5)
    scale = tensor(weight)
    scale = scale if scale.shape == inner else scale.expand(*inner).contiguous()
    shift = Tensor(np.zeros(inner, scale.dtype)) if bias is None else tensor(bias)
    shift = shift if shift.shape == inner else shift.expand(*inner).contiguous()
    result = F.layer_norm(tensor(x), scale, shift, eps)
    if len(node.outputs) == 1:
        return result
    axes = tuple(range(axis, len(x.shape)))
    return result, tensor(x).mean(axes, True), 1.0 / (tensor(x).var(axes, True, 0) + eps).sqrt()


@operator("RMSNormalization")
def _rms_norm(node: OnnxNode, x: Value, weight: Value) -> Value:
    """Divide x by its root mean square over the last axes, from the node's `axis` on, and scale by weight."""
    axis = node.get("axis", -1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis < len(x.shape) or not is_float(x, weight):
        raise ShapeError(f"{node} normalises axis {axis} of {x.shape}")
    t, axes = tensor(x), tuple(range(axis, len(x.shape)))
    size: Tensor = ((t * t).mean(axes, True) + node.get("epsilon", 1e-5)).sqrt()
    return t / size * tensor(weight)


@operator("InstanceNormalization")
def _instance_norm(node: OnnxNode, x: Value, weight: Value, bias: Value) -> Value:
    """Normalize each channel of each image over its pixels, then scale by weight and add bias."""
    if len(x.shape) < 3 or not is_float(x, weight, bias):
        raise ShapeError(f"{node} takes images, not a tensor of shape {x.shape}")
    return F.group_norm(tensor(x), x.shape[1], tensor(weight), tensor(bias), node.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(node: OnnxNode, x: Value, weight: Value, bias: Value) -> Value:
    """Normalize each group of channels of each image, then scale and shift per channel (per group before opset 21)."""
    groups = node.get("num_groups", 1)
    if len(x.shape) < 3 or not is_float(x, weight, bias) or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"{node} cannot split a tensor of shape {x.shape} into {groups} groups")
    scale, shift = tensor(weight), tensor(bias)
    if node.opset < 21 and scale.shape == (groups,):  # before version 21: one number a group
        each = np.repeat(np.arange(groups), x.shape[1] // groups)
        scale, shift = scale[each], shift[each]
    return F.group_norm(tensor(x), groups, scale, shift, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def _lp_norm(node: OnnxNode, x: Value) -> Value:
    """Divide x by its 1- or 2-norm along an axis; vectors of zeros stay zeros."""
    axis, p, t = node.get("axis", -1), node.get("p", 2), tensor(x)
    if not -t.ndim <= axis < t.ndim or p not in (1, 2):
        raise ShapeError(f"{node} normalises axis {axis} of {x.shape} by the {p}-norm")
    size = abs(t).sum(axis, True) if p == 1 else (t * t).sum(axis, True).sqrt()
    result: Tensor = t / (size + Tensor((size.data == 0).astype(t.dtype)))  # nothing but zeros stays zeros
    return result


@operator("LRN")
def _lrn(node: OnnxNode, x: Value) -> Value:
    """Normalize across neighbouring channels (local response normalization, Krizhevsky et al. 2012)."""
    size = node.get("size", 1)
    if len(x.shape) < 3 or not 1 <= size <= 2 * x.shape[1] + 1 or not is_float(x):
        raise ShapeError(f"{node} normalises over {size} channels of {x.shape}")
    t = tensor(x)
    before = (size - 1) // 2
    squares = (t * t).pad([(0, 0), (before, size - 1 - before), *[(0, 0)] * (t.ndim - 2)])
    total = squares[:, : t.shape[1]]
    for i in range(1, size):
        total = total + squares[:, i : i + t.shape[1]]
    scale = total * (node.get("alpha", 1e-4) / size) + node.get("bias", 1.0)
    result: Tensor = t / scale ** node.get("beta", 0.75)
    return result
