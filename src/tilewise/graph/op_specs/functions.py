"""Elementwise operations: the ONNX operator and the native function of each.

The importer, the exporter and the lowering read these records. A new function is its operation (tilewise.ops), a line
here, and a line of native/kernels/strided.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise import ops
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
    # Activations, which layers also apply to their results (activations.py).
    Function(ops.Relu, "Relu", "relu"),
    Function(ops.Sigmoid, "Sigmoid", "sigmoid"),
    Function(ops.HardSwish, "HardSwish"),
    Function(ops.Gelu, native="gelu"),
    Function(ops.Silu, native="silu"),
    Function(ops.LeakyRelu, "LeakyRelu", attributes={"slope": ("alpha", 0.01)}),
    Function(ops.HardSigmoid, "HardSigmoid", attributes={"slope": ("alpha", 0.2), "offset": ("beta", 0.5)}),
)
