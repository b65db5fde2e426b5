"""The operators of the native runtime, one record (`OpSpec`) each: the float plan, the quantizer and the ONNX writer
read it.

A new operator is one entry here, a lowering rule (passes/lower_layers.py) or a pattern that creates it, and its native
implementation (native/ops).
"""

from tilewise.graph.op_specs.layers import LAYERS
from tilewise.graph.op_specs.pointwise import POINTWISE
from tilewise.graph.op_specs.spec import EmitContext, OnnxForm, OpSpec, Quantization

NATIVE_OPS: dict[str, OpSpec] = LAYERS | POINTWISE


def kinds_with(*quantizations: Quantization) -> tuple[str, ...]:
    """Return the operator kinds whose `OpSpec.quantization` is one of these."""
    return tuple(kind for kind, spec in NATIVE_OPS.items() if spec.quantization in quantizations)


__all__ = ["NATIVE_OPS", "EmitContext", "OnnxForm", "OpSpec", "Quantization", "kinds_with"]
