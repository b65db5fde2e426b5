"""The ONNX operations that tilewise runs, by name."""

from tilewise.onnx.operators import attention, elementwise, quantized, reductions, shapes, windows
from tilewise.onnx.operators.base import TABLE, Value, array, most_alive, room_for, tensor

__all__ = [
    "TABLE",
    "Value",
    "array",
    "attention",
    "elementwise",
    "most_alive",
    "quantized",
    "reductions",
    "room_for",
    "shapes",
    "tensor",
    "windows",
]
