"""The ONNX operations that tilewise runs, by name."""

from tilewise.onnx.operators import (
    attention,
    elementwise,
    quantized,
    reductions,
    resizing,
    shapes,
    windows,
)
from tilewise.onnx.operators.base import TABLE, Value, array, limit_sizes, most_alive, tensor

__all__ = [
    "TABLE",
    "Value",
    "array",
    "attention",
    "elementwise",
    "limit_sizes",
    "most_alive",
    "quantized",
    "reductions",
    "resizing",
    "shapes",
    "tensor",
    "windows",
]
