"""The ONNX operations that tilewise runs, by name."""

from tilewise.onnx.operators import (
    activations,
    attention,
    elementwise,
    lookup,
    norms,
    quantized,
    recurrent,
    reductions,
    resizing,
    shapes,
    windows,
)
from tilewise.onnx.operators.base import TABLE, Value, array, most_alive, room_for, tensor

__all__ = [
    "TABLE",
    "Value",
    "activations",
    "array",
    "attention",
    "elementwise",
    "lookup",
    "most_alive",
    "norms",
    "quantized",
    "recurrent",
    "reductions",
    "resizing",
    "room_for",
    "shapes",
    "tensor",
    "windows",
]
