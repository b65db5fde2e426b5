"""ONNX operations that work number by number: arithmetic, functions, comparisons, types, quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import ops
from tilewise.errors import DtypeError, ShapeError
from tilewise.graph.op_specs.functions import BINARY, UNARY
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import (
    Value,
    are_constants,
    array,
    axis_of,
    broadcast,
    choice,
    computed,
    is_float,
    operator,
    read_values,
    same_type,
    tensor,
)
from tilewise.onnx.reader import dtype_of
from tilewise.tensor import Array, Tensor, apply, where


def _integer_division(a: Array, b: Array) -> Array:
    """Divide integers with truncation towards zero, as C does; division by zero gives 0."""
    safe = np.where(b == 0, 1, b)
    quotient = np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe)) if a.dtype.kind == "i" else a // safe
    return np.where(b == 0, 0, quotient).astype(a.dtype)


def _power(a: Array, b: Array) -> Array:
    """Compute a ** b in the dtype of a; integers through float64, which allows negative exponents."""
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        return np.power(a.astype(np.float64), b).astype(a.dtype)
    return np.power(a, b).astype(a.dtype)


_ARITHMETIC = {f.onnx: f.operation for f in BINARY}
_ARITHMETIC_OF_INTEGERS: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _integer_division,
    "Pow": _power,
}


@operator(*_ARITHMETIC)
def _binary_arithmetic(node: OnnxNode, a: Value, b: Value) -> Value:
    """Compute a binary operation: with a gradient for floats, by NumPy for integers and constants."""
    operation = _ARITHMETIC[node.op]
    if node.op != "Pow":
        same_type(node, a, b)
    broadcast(a, b)
    if not is_float(a, b):
        return computed(_ARITHMETIC_OF_INTEGERS[node.op], a, b, name=node.op)
    if are_constants(a, b):
        with np.errstate(all="ignore"):
            return np.asarray(operation().forward(a, b))
    return apply(operation, tensor(a), tensor(b))


# --- functions of one number ---

_FUNCTIONS = {f.onnx: f for f in UNARY if f.onnx}
_OF_INTEGERS: dict[str, Callable[[Array], Array]] = {
    "Abs": np.abs,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0),
}
# By NumPy, without a gradient: functions of one tensor, and of two.
_PLAIN: dict[str, Callable[..., Any]] = {
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sign": np.sign,
    "IsNaN": np.isnan,
    "Tan": np.tan,
    "Asin": np.arcsin,
    "Acos": np.arccos,
    "Atan": np.arctan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Asinh": np.arcsinh,
    "Acosh": np.arccosh,
    "Atanh": np.arctanh,
    "Not": np.logical_not,
    "BitwiseNot": np.bitwise_not,
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "Mod": np.mod,
}
# Functions of one float tensor that are made of operations with a gradient.
_COMPOSED: dict[str, Callable[[OnnxNode, Tensor], Tensor]] = {
    "Reciprocal": lambda _, t: 1.0 / t,
    "Elu": lambda node, t: apply(ops.Elu, t, alpha=node.get("alpha", 1.0)),
    "Selu": lambda node, t: apply(
        ops.Elu,
        t,
        alpha=node.get("alpha", 1.67326319217681884765625),
        scale=node.get("gamma", 1.05070102214813232421875),
    ),
    "Celu": lambda node, t: apply(ops.Elu, t, alpha=node.get("alpha", 1.0), width=node.get("alpha", 1.0)),
    "ThresholdedRelu": lambda node, t: where(t > node.get("alpha", 1.0), t, 0.0),
    "Softsign": lambda _, t: t / (abs(t) + 1.0),
    "Mish": lambda _, t: t * F.softplus(t).tanh(),
    "Swish": lambda node, t: F.silu(t) if node.get("alpha", 1.0) == 1 else t * (t * node.get("alpha", 1.0)).sigmoid(),
    "Gelu": lambda node, t: (
        F.gelu(t) if choice(node, "approximate", "none", ("none", "tanh")) == "none" else F.gelu_tanh(t)
    ),
}


def float_only(node: OnnxNode, *values: Value) -> None:
    if not is_float(*values):
        raise DtypeError(f"{node} takes floating-point numbers, not {array(values[0]).dtype}")


@operator(*_FUNCTIONS)
def _function(node: OnnxNode, x: Value) -> Value:
    """Apply an elementwise function: with a gradient for floats, by NumPy for integers and constants."""
    if not is_float(x) and node.op in _OF_INTEGERS:
        return computed(_OF_INTEGERS[node.op], x, name=node.op)
    float_only(node, x)
    function = _FUNCTIONS[node.op]
    params = {name: node.get(attribute, default) for name, (attribute, default) in function.attributes.items()}
    if are_constants(x):
        return np.asarray(function.operation().forward(array(x), **params))
    return apply(function.operation, tensor(x), **params)


@operator(*_PLAIN)
def _plain(node: OnnxNode, *values: Value) -> Value:
    """Apply a NumPy function to arrays; two operands must have the same dtype."""
    if node.op == "Not" and array(values[0]).dtype != bool:
        raise DtypeError(f"{node} takes booleans, not {array(values[0]).dtype}")
    same_type(node, *values)
    broadcast(*values)
    function = np.fmod if node.op == "Mod" and node.get("fmod", 0) else _PLAIN[node.op]
    return computed(function, *values, name=node.op)


@operator(*_COMPOSED)
def _composed(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    return _COMPOSED[node.op](node, tensor(x))


@operator("IsInf")
def _is_inf(node: OnnxNode, x: Value) -> Value:
    positive, negative = node.get("detect_positive", 1), node.get("detect_negative", 1)
    return computed(lambda a: np.isinf(a) & (((a > 0) & bool(positive)) | ((a < 0) & bool(negative))), x, name=node.op)


@operator("Clip")
def _clip(node: OnnxNode, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    """Limit x to [low, high]; either bound may be missing."""
    bounds = [None if b is None else read_values(b).reshape(()).item() for b in (low, high)]
    if are_constants(x) or not is_float(x):
        return computed(lambda a: np.clip(a, *bounds).astype(a.dtype), x, name=node.op)
    return tensor(x).clip(*bounds)


# --- several at once ---


@operator("Max", "Min")
def _extreme(node: OnnxNode, *values: Value) -> Value:
    """Compute the elementwise maximum or minimum (Max, Min) of any number of tensors."""
    same_type(node, *values)
    broadcast(*values)
    plain = np.maximum if node.op == "Max" else np.minimum
    result = values[0]
    for value in values[1:]:
        if is_float(result, value) and not are_constants(result, value):
            a, b = tensor(result), tensor(value)
            result = a.maximum(b) if node.op == "Max" else a.minimum(b)
        else:
            result = computed(plain, result, value, name=node.op)
    return result


@operator("Sum", "Mean")
def _sum(node: OnnxNode, *values: Value) -> Value:
    """Compute the Sum or Mean of any number of tensors, broadcast to each other."""
    float_only(node, *values)
    broadcast(*values)
    total: Tensor = tensor(values[0])
    for value in values[1:]:
        total = total + tensor(value)
    return total / float(len(values)) if node.op == "Mean" else total


@operator("Where")
def _where(node: OnnxNode, condition: Value, a: Value, b: Value) -> Value:
    """Select from two tensors by a condition, which may depend on the network's input."""
    if array(condition).dtype != bool:
        raise DtypeError(f"{node} selects by booleans, not by {array(condition).dtype}")
    same_type(node, a, b)
    broadcast(condition, a, b)
    if are_constants(a, b) or not is_float(a, b):
        return computed(np.where, condition, a, b, name=node.op)
    return where(array(condition), tensor(a), tensor(b))


# --- types ---


@operator("Cast")
def _cast(node: OnnxNode, x: Value) -> Value:
    return _as_type(node, x, dtype_of(node.get("to", 0), node))


@operator("CastLike")
def _cast_like(node: OnnxNode, x: Value, like: Value) -> Value:
    return _as_type(node, x, array(like).dtype)


def _as_type(node: OnnxNode, x: Value, dtype: np.dtype[Any]) -> Value:
    """Convert x to a dtype; a float tensor converted to floats stays differentiable."""
    if array(x).dtype == dtype:
        return x
    if isinstance(x, Tensor) and is_float(x) and dtype.kind == "f":
        return x.astype(dtype)
    return computed(lambda a: a.astype(dtype), x, name=node.op)


@operator("Identity")
def _identity(_node: OnnxNode, x: Value) -> Value:
    return x


@operator("Dropout")
def _dropout(node: OnnxNode, x: Value, ratio: Value | None = None, training: Value | None = None) -> Any:
    """Return the input unchanged: networks are loaded for inference, where dropout does nothing."""
    if training is not None and read_values(training).any():
        raise DtypeError(f"{node} drops numbers at random, as while training; export the network in eval mode")
    mask = np.broadcast_to(np.bool_(True), x.shape)
    return (x, mask) if len(node.outputs) > 1 else x


@operator("PRelu")
def _prelu(node: OnnxNode, x: Value, slope: Value) -> Value:
    """Compute max(x, 0) + slope * min(x, 0)."""
    float_only(node, x, slope)
    broadcast(x, slope)
    t = tensor(x)
    return t.relu() - (-t).relu() * tensor(slope)


# --- quantized numbers: a network in QDQ form runs in float between them ---

_BYTES = (np.int8, np.uint8, np.int16, np.uint16, np.int32)


def _along(node: OnnxNode, x: Value, scale: Array) -> Array:
    """Reshape a scale or zero point, a scalar or one number per entry of `axis`, to broadcast over `x`."""
    if node.get("block_size", 0):
        raise ShapeError(f"{node} has a scale per block, which tilewise does not compute")
    if scale.size == 1:
        return scale.reshape(())
    axis = axis_of(node.get("axis", 1), len(x.shape), node)
    if scale.ndim != 1 or len(scale) != x.shape[axis]:
        raise ShapeError(f"{node} has scales of shape {scale.shape} for axis {axis} of {x.shape}")
    return scale.reshape([-1 if i == axis else 1 for i in range(len(x.shape))])


@operator("QuantizeLinear")
def _quantize(node: OnnxNode, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Quantize to the dtype of the zero point, or to `output_dtype`; NaN becomes 0."""
    kind: np.dtype[Any] = np.dtype(np.uint8)
    if zero is not None:
        kind = array(zero).dtype
    elif node.get("output_dtype", 0):
        kind = dtype_of(node.get("output_dtype", 0), node)
    if kind.type not in _BYTES:
        raise DtypeError(f"{node} quantizes to {kind}, which tilewise does not compute")
    by = _along(node, x, read_values(scale))
    shift = np.int64(0) if zero is None else _along(node, x, read_values(zero)).astype(np.int64)
    limits = np.iinfo(kind)

    def run(a: Array) -> Array:
        rounded = np.rint(np.nan_to_num(a / by, nan=0.0, posinf=1e9, neginf=-1e9)).astype(np.float64) + shift
        return np.clip(rounded, limits.min, limits.max).astype(kind)

    return computed(run, x, name=node.op)


@operator("DequantizeLinear")
def _dequantize(node: OnnxNode, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Compute (x - zero) · scale in float32; scale and zero point may be per entry of an axis."""
    if array(x).dtype.type not in _BYTES:
        raise DtypeError(f"{node} is given {array(x).dtype}, which tilewise does not accept as 8-bit integers")
    by = _along(node, x, read_values(scale))
    shift = np.int64(0) if zero is None else _along(node, x, read_values(zero)).astype(np.int64)
    return computed(lambda a: ((a.astype(np.int64) - shift) * by).astype(by.dtype), x, name=node.op)


@operator("DynamicQuantizeLinear")
def _dynamic_quantize_linear(node: OnnxNode, x: Value) -> Any:
    """Quantize float values to uint8 by their own range; return (integers, scale, zero point)."""
    data = read_values(x)
    low, high = min(float(data.min(initial=0)), 0.0), max(float(data.max(initial=0)), 0.0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
    q = computed(lambda a: np.clip(np.rint(a / scale) + zero, 0, 255).astype(np.uint8), x, name=node.op)
    return q, np.asarray(scale), np.asarray(zero)
