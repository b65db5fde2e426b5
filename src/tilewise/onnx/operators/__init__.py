"""The ONNX operations that tilewise runs, by name."""

from tilewise.onnx.operators import (
    attention,
    elementwise,
    reductions,
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
    "reductions",
    "shapes",
    "tensor",
    "windows",
]
