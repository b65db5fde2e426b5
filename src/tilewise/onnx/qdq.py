"""A model in INT8 as an ONNX file in QDQ form: bytes where tilewise computes in bytes, with the same scales.

Every integer step becomes the float operation between a `DequantizeLinear` of what it reads and a `QuantizeLinear` of
what it gives; weights are int8 with a scale per channel, biases int32. Runtimes fuse these into integer kernels; each
rounds at the same places, so results agree but for numbers on the edge between two bytes. Activations of 16 bits and
the weights that read them are int16, which ONNX has from opset 21 on, clipped to the numbers that tilewise has.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.graph.ir import Array, Op, Value
from tilewise.graph.op_specs.functions import write_activation
from tilewise.graph.ops import NATIVE_OPS
from tilewise.onnx.emit import EMITTERS, Emission, repeat
from tilewise.onnx.graph import Port
from tilewise.onnx.writer import OPSET, OnnxWriter
from tilewise.quantize.graph import RepeatedConstant, at_batch
from tilewise.quantize.lowering import KEEPS_PARAMETERS
from tilewise.quantize.operators import Affine

_WITH_INT16 = 21  # the first opset that quantizes to 16 bits


def save_quantized(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a QuantizedModel as an ONNX file with QuantizeLinear and DequantizeLinear nodes."""
    writer = _Quantized(model)
    steps = model.graph.steps
    for index in range(1, len(steps)):
        writer.step(index)
    last = len(steps) - 1
    graph = writer.graph
    result = graph.node("Identity", [writer.real[last]], [graph.name("output")])
    shapes = model.calibration.shapes
    kind = np.dtype(np.float32)
    graph.write(path, [Port("input", kind, ("N", *shapes[0]))], [Port(result, kind, ("N", *shapes[last]))])


class _Quantized:
    """Writes a quantized model's operators; tracks the name of each one's dequantized result."""

    def __init__(self, model: Any) -> None:
        """Start an empty ONNX graph into which the operators of the quantized `model` are written."""
        self.model = model
        has_int16 = any(parameters.is_int16 for parameters in model.affine)
        self.graph = OnnxWriter(max(OPSET, _WITH_INT16) if has_int16 else OPSET)
        self.real: dict[int, str] = {0: self.graph.name("input")}
        self._bytes: dict[int, str] = {}  # the result after quantizing and back
        self._layer: Any = None  # the integer layer of the step that is being written

    def step(self, index: int) -> None:
        """Write operator `index` as a float operation between dequantized inputs and a quantized result."""
        step, layer = self.model.graph.steps[index], self.model.integer[index]
        reads = [self.real[i] if layer is None else self.through_bytes(i) for i in step.inputs]
        self.real[index] = self._operation(step, layer, reads)
        if layer is None or (step.kind == "linear" and layer.output is None):
            return
        if step.kind in (*KEEPS_PARAMETERS, "concat") and step.kind != "avg_pool":
            self._bytes[index] = self.real[index]  # bytes already, moved only
        else:
            self.real[index] = self.through_bytes(index)

    def through_bytes(self, index: int) -> str:
        """Return the name of an operator's result after quantization and dequantization."""
        if index not in self._bytes:
            parameters = self.model.affine[index]
            scale = self.graph.constant(parameters.scale, np.float32)
            zero = self.graph.constant(parameters.zero_point, np.int16 if parameters.is_int16 else np.uint8)
            real = self.real[index]
            if parameters.is_int16:
                low, high = (self.number(end * parameters.scale) for end in parameters.limits)
                real = self.node("Clip", real, low, high)
            q = self.graph.node("QuantizeLinear", [real, scale, zero])
            self._bytes[index] = self.graph.node("DequantizeLinear", [q, scale, zero])
        return self._bytes[index]

    def _operation(self, step: Op, layer: Any, reads: list[str]) -> str:
        """Write the float form of an operator that reads the values `reads`; return its result's name."""
        if step.kind == "python":
            return self._float_step(step, reads)
        if step.kind == "linear" and layer is not None:
            return write_activation(self, self._linear(step, layer, reads[0]), step.activation)
        if isinstance(layer, Affine):
            step = replace(step, weight=layer.scale, bias=layer.shift)
        self._layer, write = layer, NATIVE_OPS[step.kind].onnx
        assert write is not None
        return write(self, step, reads)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        return str(self.graph.node(op, list(inputs), **attributes))

    def number(self, value: float) -> str:
        return str(self.graph.constant(value, np.float32))

    def weights(self, op: Op) -> list[str]:
        """Write an operator's weights, dequantized if the current layer is integer; return their names."""
        if self._layer is None:
            arrays = [(name, getattr(op, name)) for name in ("weight", "bias")]
            return [self.graph.weight(a, f"{op.name}.{name}") for name, a in arrays if a is not None]
        layer, q = self._layer, self._layer.kernel.weights()  # (O, kh, kw, C / groups)
        weight = np.ascontiguousarray(q.transpose(0, 3, 1, 2))
        bias = layer.offset.astype(np.int64) + layer.operand.zero_point * q.reshape(len(q), -1).astype(np.int64).sum(1)
        return [self._weight(op.name, weight, layer.weight_scale), self._bias(op.name, bias, layer)]

    def _float_step(self, step: Op, reads: list[str]) -> str:
        """Write an operator that runs in float between quantized values; return its result's name."""
        assert step.node is not None
        node, other = (at_batch(step.node, self.model.graph.batch + more) for more in (0, 1))
        names = dict(zip(node.reads(), reads, strict=True))

        def name_of(value: Any) -> str:
            if isinstance(value, Value):
                return str(names[value])
            if isinstance(value, RepeatedConstant):
                one = self.graph.weight(value.array, f"{step.name}.constant")
                return repeat(self.graph, one, value.array.shape, value.axis, self.real[0])
            return str(self.graph.constant(value, np.asarray(value).dtype))

        emission = Emission(self.graph, node, [name_of(v) for v in step.node.inputs], name_of)
        emission.batch_input = self.real[0]
        emission.other_shape = other.params.get("shape", node.shape)
        write = EMITTERS.get(node.operation.__name__)
        if write is None:
            raise ConfigurationError(f"{step.name} runs {node.operation.__name__} in float, which has no form in ONNX")
        return write(emission)

    def _linear(self, step: Op, layer: Any, x: str) -> str:
        """Write a linear layer as a product with dequantized int8 weights, and its bias; return the output's name."""
        q = self._channels_first(step, layer.kernel.weights()[:, 0, 0, : layer.in_features])
        y = self.node("MatMul", x, self.node("Transpose", self._weight(step.name, q, layer.weight_scale), perm=[1, 0]))
        if layer.float_bias is None:
            return y
        return self.node("Add", y, self.graph.weight(layer.float_bias, f"{step.name}.bias"))

    def _channels_first(self, step: Op, q: Array) -> Array:
        """Reorder the columns of weights after a flattened image from stored (H, W, C) to (C, H, W)."""
        image = self.model.channels_last_image(step.inputs[0])
        if not image:
            return np.ascontiguousarray(q)
        c, h, w = image
        return np.ascontiguousarray(q.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(len(q), -1))

    def _weight(self, name: str, q: Array, scale: Array) -> str:
        """Write integer weights with a scale per row, and their DequantizeLinear; return the output's name."""
        integers = self.graph.weight(q, f"{name}.weight")
        zero = self.graph.weight(np.zeros(len(q), q.dtype), f"{name}.weight_zero_point")
        scales = self.graph.weight(np.broadcast_to(scale, (len(q),)).astype(np.float32), f"{name}.weight_scale")
        return str(self.graph.node("DequantizeLinear", [integers, scales, zero], axis=0))

    def _bias(self, name: str, steps: Array, layer: Any) -> str:
        """Write an int32 bias of scale (weight scale · input scale) and dequantize it; return its name."""
        integers = self.graph.weight(steps.astype(np.int32), f"{name}.bias")
        scale = np.broadcast_to(layer.weight_scale, (len(steps),)).astype(np.float64) * layer.operand.scale
        scales = self.graph.weight(scale.astype(np.float32), f"{name}.bias_scale")
        zero = self.graph.weight(np.zeros(len(steps), np.int32), f"{name}.bias_zero_point")
        return str(self.graph.node("DequantizeLinear", [integers, scales, zero], axis=0))
