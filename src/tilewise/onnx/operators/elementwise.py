"""ONNX operations that work number by number: arithmetic, functions, comparisons, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import ops
from tilewise.errors import DtypeError
from tilewise.graph.op_specs.functions import BINARY, UNARY
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import (
    Array,
    Value,
    are_constants,
    array,
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
from tilewise.tensor import Tensor, apply, where


def _integer_division(a: Array, b: Array) -> Array:
    """Divide integers as C does, towards zero; a division by zero gives zero instead of a signal."""
    safe = np.where(b == 0, 1, b)
    quotient = np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe)) if a.dtype.kind == "i" else a // safe
    return np.where(b == 0, 0, quotient).astype(a.dtype)


def _power(a: Array, b: Array) -> Array:
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
_PLAIN: dict[str, Callable[[Array], Array]] = {
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
def _plain(node: OnnxNode, x: Value) -> Value:
    if node.op in ("Not",) and array(x).dtype != bool:
        raise DtypeError(f"{node} takes booleans, not {array(x).dtype}")
    return computed(_PLAIN[node.op], x, name=node.op)


@operator("Reciprocal")
def _reciprocal(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    return 1.0 / tensor(x)


@operator("IsInf")
def _is_inf(node: OnnxNode, x: Value) -> Value:
    positive, negative = node.get("detect_positive", 1), node.get("detect_negative", 1)
    return computed(lambda a: np.isinf(a) & (((a > 0) & bool(positive)) | ((a < 0) & bool(negative))), x, name=node.op)


@operator("Clip")
def _clip(node: OnnxNode, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    bounds = [None if b is None else read_values(b).reshape(()).item() for b in (low, high)]
    if are_constants(x) or not is_float(x):
        return computed(lambda a: np.clip(a, *bounds).astype(a.dtype), x, name=node.op)
    return tensor(x).clip(*bounds)


# --- several at once ---


@operator("Max", "Min")
def _extreme(node: OnnxNode, *values: Value) -> Value:
    """Compute the maximum or minimum of any number of tensors."""
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
    float_only(node, *values)
    broadcast(*values)
    total: Tensor = tensor(values[0])
    for value in values[1:]:
        total = total + tensor(value)
    return total / float(len(values)) if node.op == "Mean" else total


_COMPARISONS: dict[str, Callable[[Array, Array], Any]] = {
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
}


@operator(*_COMPARISONS)
def _comparison(node: OnnxNode, a: Value, b: Value) -> Value:
    same_type(node, a, b)
    broadcast(a, b)
    return computed(_COMPARISONS[node.op], a, b, name=node.op)


@operator("Mod")
def _mod(node: OnnxNode, a: Value, b: Value) -> Value:
    same_type(node, a, b)
    broadcast(a, b)
    return computed(np.fmod if node.get("fmod", 0) else np.mod, a, b, name=node.op)


@operator("Where")
def _where(node: OnnxNode, condition: Value, a: Value, b: Value) -> Value:
    """Choose between two tensors by a condition, which may be computed too."""
    if array(condition).dtype != bool:
        raise DtypeError(f"{node} chooses by booleans, not by {array(condition).dtype}")
    same_type(node, a, b)
    broadcast(condition, a, b)
    if are_constants(condition, a, b) or not is_float(a, b) or isinstance(condition, Tensor):
        if are_constants(a, b) or not is_float(a, b):
            return computed(np.where, condition, a, b, name=node.op)
        return apply(Choose, tensor(condition), tensor(a), tensor(b))
    return where(array(condition), tensor(a), tensor(b))


class Choose(ops.Operation):
    """condition ? a : b where the condition is computed too."""

    def forward(self, condition: Array, a: Array, b: Array) -> Array:
        self.condition = condition
        return np.where(condition, a, b)

    def backward(self, grad: Array) -> Any:
        return None, np.where(self.condition, grad, 0), np.where(self.condition, 0, grad)


# --- types ---


@operator("Cast")
def _cast(node: OnnxNode, x: Value) -> Value:
    return _as_type(node, x, dtype_of(node.get("to", 0), node))


@operator("CastLike")
def _cast_like(node: OnnxNode, x: Value, like: Value) -> Value:
    return _as_type(node, x, array(like).dtype)


def _as_type(node: OnnxNode, x: Value, dtype: np.dtype[Any]) -> Value:
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
    if training is not None and array(training).any():
        raise DtypeError(f"{node} drops numbers at random, as while training; export the network in eval mode")
    mask = np.broadcast_to(np.bool_(True), x.shape)
    return (x, mask) if len(node.outputs) > 1 else x


# --- activations ---


@operator("PRelu")
def _prelu(node: OnnxNode, x: Value, slope: Value) -> Value:
    float_only(node, x, slope)
    broadcast(x, slope)
    t = tensor(x)
    return t.relu() - (-t).relu() * tensor(slope)


@operator("Elu")
def _elu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    return apply(ops.Elu, tensor(x), alpha=node.get("alpha", 1.0))


@operator("Selu")
def _selu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return apply(ops.Elu, tensor(x), alpha=alpha, scale=gamma)


@operator("Celu")
def _celu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    alpha = node.get("alpha", 1.0)
    return apply(ops.Elu, tensor(x), alpha=alpha, width=alpha)


@operator("ThresholdedRelu")
def _thresholded(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t = tensor(x)
    return where(t > node.get("alpha", 1.0), t, 0.0)


@operator("Softsign")
def _softsign(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t = tensor(x)
    return t / (abs(t) + 1.0)


@operator("Mish")
def _mish(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t = tensor(x)
    return t * F.softplus(t).tanh()


@operator("Swish")
def _swish(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t, alpha = tensor(x), node.get("alpha", 1.0)
    return F.silu(t) if alpha == 1 else t * (t * alpha).sigmoid()


@operator("Gelu")
def _gelu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    exact = choice(node, "approximate", "none", ("none", "tanh")) == "none"
    return F.gelu(tensor(x)) if exact else F.gelu_tanh(tensor(x))
