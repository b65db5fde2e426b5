"""Primitive operations of the tensor, each with its gradient.

The three most important names: `Operation` (base class), `MatMul` and `GetItem` are typical examples.
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names
from tilewise.ops.base import Array, Axis, Grads, Operation, floating, reduced_axes, silent

if TYPE_CHECKING:
    from tilewise.ops.activations import Elu, Erf, HardSigmoid, HardSwish, LeakyRelu, Silu, Softplus
    from tilewise.ops.elementwise import (
        Abs,
        Add,
        Clip,
        Cos,
        Div,
        Exp,
        Gelu,
        Log,
        Maximum,
        Mul,
        Neg,
        Pow,
        Relu,
        Sigmoid,
        Sin,
        Sqrt,
        Sub,
        Tanh,
        Where,
    )
    from tilewise.ops.matmul import MatMul
    from tilewise.ops.reductions import CumSum, Max, Mean, Softmax, Sum, Var
    from tilewise.ops.shapes import Cast, Cat, Copy, Expand, GetItem, Pad, Permute, Reshape, SetItem, TakeAlongAxis

__all__ = [
    "Abs",
    "Add",
    "Array",
    "Axis",
    "Cast",
    "Cat",
    "Clip",
    "Copy",
    "Cos",
    "CumSum",
    "Div",
    "Elu",
    "Erf",
    "Exp",
    "Expand",
    "Gelu",
    "GetItem",
    "Grads",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Log",
    "MatMul",
    "Max",
    "Maximum",
    "Mean",
    "Mul",
    "Neg",
    "Operation",
    "Pad",
    "Permute",
    "Pow",
    "Relu",
    "Reshape",
    "SetItem",
    "Sigmoid",
    "Silu",
    "Sin",
    "Softmax",
    "Softplus",
    "Sqrt",
    "Sub",
    "Sum",
    "TakeAlongAxis",
    "Tanh",
    "Var",
    "Where",
    "floating",
    "reduced_axes",
    "silent",
]

__getattr__ = late_names(
    __name__,
    {
        ".activations": "Elu Erf HardSigmoid HardSwish LeakyRelu Silu Softplus",
        ".elementwise": "Abs Add Clip Cos Div Exp Gelu Log Maximum Mul Neg Pow Relu Sigmoid Sin Sqrt Sub Tanh Where",
        ".matmul": "MatMul",
        ".reductions": "CumSum Max Mean Softmax Sum Var",
        ".shapes": "Cast Cat Copy Expand GetItem Pad Permute Reshape SetItem TakeAlongAxis",
    },
)
