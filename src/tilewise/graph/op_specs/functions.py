"""Elementwise operations: the ONNX operator and the native function of each, and the activations of layers.

The importer, the exporter and the lowering read these records. A new function is its operation (tilewise.ops), a line
here, and a line of native/kernels/strided.h. Activations, which layers apply to their results, have the name that is in
`Op.activation`; LeakyReLU is named with its slope, "leaky_relu 0.1".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewise import ops
from tilewise.backend.registry import current_backend
from tilewise.graph.ir import Array
from tilewise.graph.op_specs.spec import OnnxNodes
from tilewise.ops.activations import Shrink
from tilewise.ops.base import Operation


@dataclass(frozen=True)
class Function:
    """An operation of one or two operands.

    `onnx` is its ONNX operator ("" if several operators make it up), `native` the function of the native op "map" (""
    if it runs in Python), and `attributes` the ONNX attribute and its default for each parameter of the operation.
    """

    operation: type[Operation]
    onnx: str = ""
    native: str = ""
    attributes: Mapping[str, tuple[str, float]] = field(default_factory=dict)


BINARY = (
    Function(ops.Add, "Add", "add"),
    Function(ops.Sub, "Sub", "sub"),
    Function(ops.Mul, "Mul", "mul"),
    Function(ops.Div, "Div", "div"),
    Function(ops.Pow, "Pow", "pow"),
)
UNARY = (
    Function(ops.Neg, "Neg", "neg"),
    Function(ops.Abs, "Abs", "abs"),
    Function(ops.Exp, "Exp", "exp"),
    Function(ops.Log, "Log", "log"),
    Function(ops.Sqrt, "Sqrt", "sqrt"),
    Function(ops.Tanh, "Tanh", "tanh"),
    Function(ops.Erf, "Erf", "erf"),
    Function(ops.Sin, "Sin", "sin"),
    Function(ops.Cos, "Cos", "cos"),
    Function(ops.Softplus, "Softplus", "softplus"),
    Function(Shrink, "Shrink", "shrink", {"limit": ("lambd", 0.5), "bias": ("bias", 0.0)}),
    # Activations, which layers also apply to their results.
    Function(ops.Relu, "Relu", "relu"),
    Function(ops.Sigmoid, "Sigmoid", "sigmoid"),
    Function(ops.HardSwish, "HardSwish"),
    Function(ops.Gelu, native="gelu"),
    Function(ops.Silu, native="silu"),
    Function(ops.LeakyRelu, "LeakyRelu", attributes={"slope": ("alpha", 0.01)}),
    Function(ops.HardSigmoid, "HardSigmoid", attributes={"slope": ("alpha", 0.2), "offset": ("beta", 0.5)}),
)


# --- activations of layers ---


@dataclass(frozen=True)
class Activation:
    """The name of the traced operation ("" if its parameters decide), a NumPy function, and the ONNX form."""

    operation: str
    reference: Callable[[Array], Array]
    onnx: Callable[[OnnxNodes, str], str]


def _dispatch(name: str) -> Callable[[Array], Array]:
    return lambda x: np.asarray(current_backend().dispatch(name, x))


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _hard_sigmoid(x: Array) -> Array:
    return np.asarray(np.clip(x + np.float32(3), 0, 6) / np.float32(6))


# Opset 17 has no Gelu: x / 2 · (1 + erf(x / sqrt(2))).
def _gelu_onnx(form: OnnxNodes, x: str) -> str:
    inner = form.node("Erf", form.node("Mul", x, form.number(0.5**0.5)))
    return form.node("Mul", form.node("Mul", x, form.number(0.5)), form.node("Add", inner, form.number(1.0)))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation("Relu", _dispatch("relu"), lambda form, x: form.node("Relu", x)),
    "gelu": Activation("Gelu", _dispatch("gelu"), _gelu_onnx),
    "sigmoid": Activation("Sigmoid", _sigmoid, lambda form, x: form.node("Sigmoid", x)),
    "silu": Activation("Silu", lambda x: x * _sigmoid(x), lambda form, x: form.node("Mul", x, form.node("Sigmoid", x))),
    "hard_swish": Activation("HardSwish", lambda x: x * _hard_sigmoid(x), lambda form, x: form.node("HardSwish", x)),
    "relu6": Activation(
        "", lambda x: np.clip(x, 0, 6), lambda form, x: form.node("Clip", x, form.number(0), form.number(6))
    ),
    "hard_sigmoid": Activation("", _hard_sigmoid, lambda form, x: form.node("HardSigmoid", x, alpha=1 / 6, beta=0.5)),
}


def is_leaky(activation: str) -> bool:
    """Tell whether an activation is a LeakyReLU."""
    return activation.startswith("leaky_relu ")


def leaky_slope(activation: str) -> float:
    """Parse the negative slope from the name of a LeakyReLU, such as "leaky_relu 0.1"."""
    return float(activation.partition(" ")[2])


def activated(x: Array, name: str) -> Array:
    """Apply the activation called `name` to an array; "" is the identity."""
    if is_leaky(name):
        return np.maximum(x, x * np.float32(leaky_slope(name)))
    return ACTIVATIONS[name].reference(x) if name else x


def write_activation(form: OnnxNodes, x: str, name: str) -> str:
    """Add the activation called `name` to an ONNX file and return its result's name; "" adds nothing."""
    if is_leaky(name):
        return form.node("LeakyRelu", x, alpha=leaky_slope(name))
    return ACTIVATIONS[name].onnx(form, x) if name else x
