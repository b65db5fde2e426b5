"""A model in INT8 as an ONNX file in QDQ form: bytes where tilewise computes in bytes, with the same scales.

Every integer step becomes the float operation between a `DequantizeLinear` of what it reads and a `QuantizeLinear` of
what it gives; weights are int8 with a scale per channel, biases int32. Runtimes fuse these into integer kernels; each
rounds at the same places, so results agree but for numbers on the edge between two bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.onnx.emit_layers import sides
from tilewise.onnx.graph import Array, Port
from tilewise.onnx.integers import OPEN, Bound
from tilewise.onnx.resave import LAYERS
from tilewise.onnx.writer import OPSET, Writer


def save_quantized(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a QuantizedModel."""
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
    """The graph, and for every step the name of its result as real numbers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        bound = [step.module.layer.node.opset for step in model.graph.steps if isinstance(step.module, Bound)]
        self.graph = Writer(max(bound, default=OPSET))
        self.real: dict[int, str] = {0: self.graph.name("input")}
        self._bytes: dict[int, str] = {}  # the result after quantizing and back

    def step(self, index: int) -> None:
        step, layer = self.model.graph.steps[index], self.model.integer[index]
        reads = [self.real[i] if layer is None else self.through_bytes(i) for i in step.inputs]
        self.real[index] = self._operation(step, layer, reads)
        if layer is not None and step.kind in ("max_pool", "avg_pool", "flatten"):
            if step.kind == "avg_pool":
                self.real[index] = self.through_bytes(index)  # rounded to the steps of what it read
            else:
                self._bytes[index] = self.real[index]  # bytes already, moved only
        elif layer is not None and not (step.kind == "linear" and layer.output is None):
            self.real[index] = self.through_bytes(index)

    def through_bytes(self, index: int) -> str:
        """A step's result, quantized and back, as integer steps see it."""
        if index not in self._bytes:
            parameters = self.model.calibration.parameters[self.model._origin(index)]
            scale = self.graph.constant(parameters.scale, np.float32)
            zero = self.graph.constant(parameters.zero_point, np.uint8)
            q = self.graph.node("QuantizeLinear", [self.real[index], scale, zero])
            self._bytes[index] = self.graph.node("DequantizeLinear", [q, scale, zero])
        return self._bytes[index]

    def _operation(self, step: Any, layer: Any, reads: list[str]) -> str:
        if step.kind == "conv":
            return self._finish(step, self._conv(step, layer, reads[0]), reads[1:])
        if step.kind == "linear":
            return self._finish(step, self._linear(step, layer, reads[0]), [])
        if step.kind in ("max_pool", "avg_pool"):
            settings = {"kernel_shape": list(step.kernel), "strides": list(step.stride), "pads": sides(step.padding)}
            if step.kind == "avg_pool":
                return str(self.graph.node("AveragePool", reads, **settings, count_include_pad=1))
            return str(self.graph.node("MaxPool", reads, **settings))
        if step.kind == "global_pool":
            return str(self.graph.node("Flatten", [self.graph.node("GlobalAveragePool", reads)], axis=1))
        if step.kind == "flatten":
            return str(self.graph.node("Flatten", reads, axis=1))
        return self._float_step(step, reads)

    def _float_step(self, step: Any, reads: list[str]) -> str:
        """An operation that runs in float, between bytes."""
        out = self.graph.name(step.name)
        if isinstance(step.module, Bound):
            node, coming = step.module.layer.node, iter(reads)
            inputs = [self._held(held, coming) for held in step.module.held]
            graph_tensor = self.graph.onnx.numpy_helper.from_array
            settings = {k: graph_tensor(v) if isinstance(v, np.ndarray) else v for k, v in node.attributes.items()}
            self.graph.node(node.op, inputs, [out, *node.outputs[1:]], **settings)
        elif type(step.module) in LAYERS:
            LAYERS[type(step.module)](self.graph, step.module, reads[0], out, step.name)
        else:
            raise ConfigurationError(
                f"{step.name} is a layer of its own kind that runs in float, without a form in ONNX"
            )
        return out

    def _held(self, held: Any, coming: Iterator[str]) -> str:
        if held is OPEN:
            return next(coming)
        return "" if held is None else self.graph.constant(held, held.dtype)

    def _finish(self, step: Any, value: str, residual: list[str]) -> str:
        for other in residual:
            value = self.graph.node("Add", [value, other])
        return self.graph.node("Relu", [value]) if step.relu else value

    def _conv(self, step: Any, layer: Any, x: str) -> str:
        settings: dict[str, Any] = {"strides": list(step.stride), "pads": sides(step.padding), "group": step.groups}
        if layer is None:
            weights = [self._float(step.name, n, getattr(step, n)) for n in ("weight", "bias")]
            return str(self.graph.node("Conv", [x, *filter(None, weights)], **settings))
        q = layer.kernel.weights()  # (O, kh, kw, C)
        weight = np.ascontiguousarray(q[..., : step_channels(self.model, step)].transpose(0, 3, 1, 2))
        bias = layer.offset.astype(np.int64) + layer.input.zero_point * q.reshape(len(q), -1).astype(np.int64).sum(1)
        names = [self._weight(step.name, weight, layer.weight_scale), self._bias(step.name, bias, layer)]
        return str(self.graph.node("Conv", [x, *names], **settings))

    def _linear(self, step: Any, layer: Any, x: str) -> str:
        if layer is None:
            weights = [self._float(step.name, n, getattr(step, n)) for n in ("weight", "bias")]
            return str(self.graph.node("Gemm", [x, *filter(None, weights)], transB=1))
        q = self._channels_first(step, layer.kernel.weights()[:, 0, 0, : layer.in_features])
        weight = self._weight(step.name, q, layer.weight_scale)
        turned = self.graph.node("Transpose", [weight], perm=[1, 0])
        y = self.graph.node("MatMul", [x, turned])
        if layer.float_bias is None:
            return str(y)
        return str(self.graph.node("Add", [y, self._float(step.name, "bias", layer.float_bias)]))

    def _channels_first(self, step: Any, q: Array) -> Array:
        """Weights behind a flattened image in the order (C, H, W): the layer has them as the bytes lie, (H, W, C)."""
        source = step.inputs[0]
        before = self.model.graph.steps[source]
        image = self.model._image_before(before) if before.kind == "flatten" else ()
        if not image or self.model.integer[source] is None:
            return np.ascontiguousarray(q)
        c, h, w = image
        return np.ascontiguousarray(q.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(len(q), -1))

    def _weight(self, name: str, q: Array, scale: Array) -> str:
        held = self.graph.weight(q, f"{name}.weight")
        zero = self.graph.weight(np.zeros(len(q), np.int8), f"{name}.weight_zero_point")
        scales = self.graph.weight(np.broadcast_to(scale, (len(q),)).astype(np.float32), f"{name}.weight_scale")
        return str(self.graph.node("DequantizeLinear", [held, scales, zero], axis=0))

    def _bias(self, name: str, steps: Array, layer: Any) -> str:
        held = self.graph.weight(steps.astype(np.int32), f"{name}.bias")
        scale = np.broadcast_to(layer.weight_scale, (len(steps),)).astype(np.float64) * layer.input.scale
        scales = self.graph.weight(scale.astype(np.float32), f"{name}.bias_scale")
        zero = self.graph.weight(np.zeros(len(steps), np.int32), f"{name}.bias_zero_point")
        return str(self.graph.node("DequantizeLinear", [held, scales, zero], axis=0))

    def _float(self, step: str, name: str, value: Array | None) -> str:
        return "" if value is None else self.graph.weight(value, f"{step}.{name}")


def step_channels(model: Any, step: Any) -> int:
    """The channels that a convolution reads."""
    return int(model.calibration.shapes[step.inputs[0]][0])
