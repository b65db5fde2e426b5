"""A model in INT8 as an ONNX file in QDQ form: bytes where tilewise computes in bytes, with the same scales.

Every integer step becomes the float operation between a `DequantizeLinear` of what it reads and a `QuantizeLinear` of
what it gives; weights are int8 with a scale per channel, biases int32. Runtimes fuse these into integer kernels; each
rounds at the same places, so results agree but for numbers on the edge between two bytes. Activations of 16 bits and
the weights that read them are int16, which ONNX has from opset 21 on, clipped to the numbers that tilewise has.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.graph.ir import Value
from tilewise.onnx.emit import EMITTERS, Emission
from tilewise.onnx.graph import Array, Port
from tilewise.onnx.writer import OPSET, OnnxWriter
from tilewise.quantize.graph import NATIVE_NORMS
from tilewise.quantize.lowering import KEEPS_PARAMETERS
from tilewise.quantize.reference import is_leaky, leaky_slope

_WITH_INT16 = 21  # the first opset that quantizes to 16 bits


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
        has_int16 = any(parameters.is_int16 for parameters in model.affine)
        self.graph = OnnxWriter(max(OPSET, _WITH_INT16) if has_int16 else OPSET)
        self.real: dict[int, str] = {0: self.graph.name("input")}
        self._bytes: dict[int, str] = {}  # the result after quantizing and back

    def step(self, index: int) -> None:
        """Write one step in float between dequantized inputs and a quantized result."""
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
        """Return a step's result after quantization and dequantization, as integer steps read it."""
        if index not in self._bytes:
            parameters = self.model.affine[index]
            scale = self.graph.constant(parameters.scale, np.float32)
            zero = self.graph.constant(parameters.zero_point, np.int16 if parameters.is_int16 else np.uint8)
            real = self.real[index]
            if parameters.is_int16:
                low, high = (self._number(end * parameters.scale) for end in parameters.limits)
                real = self._node("Clip", real, low, high)
            q = self.graph.node("QuantizeLinear", [real, scale, zero])
            self._bytes[index] = self.graph.node("DequantizeLinear", [q, scale, zero])
        return self._bytes[index]

    def _operation(self, step: Any, layer: Any, reads: list[str]) -> str:
        """Write the float operation of a step on these inputs."""
        if step.kind == "python":
            return self._float_step(step, reads)
        if step.kind in ("conv", "linear"):
            result = (self._conv if step.kind == "conv" else self._linear)(step, layer, reads[0])
            for other in reads[1:]:
                result = self._node("Add", result, other)
            return self._activated(step, result)
        if step.kind in ("add", "sub", "mul"):
            return self._activated(step, self._node(step.kind.capitalize(), *reads))
        if step.kind in NATIVE_NORMS:
            return self._norm(step, reads[0])
        if step.kind == "affine":
            return self._affine(step, layer, reads[0])
        if step.kind in ("max_pool", "avg_pool", "global_mean"):
            return self._pool(step, reads[0])
        return self._movement(step, reads)

    def _node(self, op: str, *inputs: str, **settings: Any) -> str:
        return str(self.graph.node(op, list(inputs), **settings))

    def _activated(self, step: Any, x: str) -> str:
        """Write the activation of a step."""
        name = step.activation
        if name == "relu6":
            return self._node("Clip", x, self._number(0), self._number(6))
        if is_leaky(name):
            return self._node("LeakyRelu", x, alpha=leaky_slope(name))
        if name == "silu":
            return self._node("Mul", x, self._node("Sigmoid", x))
        if name == "hard_sigmoid":
            return self._node("HardSigmoid", x, alpha=1 / 6, beta=0.5)
        if name == "gelu":
            inner = self._node("Erf", self._node("Mul", x, self._number(0.5**0.5)))
            half = self._node("Mul", x, self._number(0.5))
            return self._node("Mul", half, self._node("Add", inner, self._number(1)))
        return self._node({"relu": "Relu", "sigmoid": "Sigmoid", "hard_swish": "HardSwish"}[name], x) if name else x

    def _number(self, value: float) -> str:
        return str(self.graph.constant(value, np.float32))

    def _affine(self, step: Any, layer: Any, x: str) -> str:
        numbers = (step.weight, step.bias) if layer is None else (layer.scale, layer.shift)
        for op, name, constant in zip(("Mul", "Add"), ("weight", "bias"), numbers, strict=True):
            if constant is not None:
                by_channel = constant.reshape(1, -1, *(1,) * (len(step.shape) - 2))
                x = self._node(op, x, self._float(step.name, name, by_channel))
        return self._activated(step, x)

    def _norm(self, step: Any, x: str) -> str:
        """Write a norm over channels, or over groups of channels."""
        weight, bias = (self._float(step.name, name, getattr(step, name)) for name in ("weight", "bias"))
        if step.kind == "channel_norm":
            channels_last = self._node("Transpose", x, perm=[0, 2, 3, 1])
            normed = self._node("LayerNormalization", channels_last, weight, bias, axis=-1, epsilon=step.options["eps"])
            return self._node("Transpose", normed, perm=[0, 3, 1, 2])
        # Group norm: every group of channels is one channel of an instance norm.
        groups = step.options["groups"]
        ones, zeros = (self.graph.constant([value] * groups, np.float32) for value in (1, 0))
        rows = self._node("Reshape", x, self.graph.constant([0, groups, -1]))
        normed = self._node("InstanceNormalization", rows, ones, zeros, epsilon=step.options["eps"])
        image = self._node("Reshape", normed, self.graph.constant([0, *step.shape[1:]]))
        per_channel = (self._node("Reshape", a, self.graph.constant([1, -1, 1, 1])) for a in (weight, bias))
        return self._node("Add", self._node("Mul", image, next(per_channel)), next(per_channel))

    def _pool(self, step: Any, x: str) -> str:
        if step.kind == "global_mean":
            mean = self._node("GlobalAveragePool", x)
            return self._node("Flatten", mean, axis=1) if len(step.shape) == 2 else mean
        settings: dict[str, Any] = {"kernel_shape": list(step.kernel), "strides": list(step.stride)}
        settings["pads"] = list(step.padding)
        if step.kind == "max_pool":
            return self._node("MaxPool", x, **settings)
        return self._node("AveragePool", x, **settings, count_include_pad=int(step.options.get("count_padding", True)))

    def _movement(self, step: Any, reads: list[str]) -> str:
        """Write an operation that only moves values."""
        if step.kind == "concat":
            return self._node("Concat", *reads, axis=1)
        if step.kind == "flatten":
            return self._node("Flatten", reads[0], axis=1)
        if step.kind == "gather_channels":
            return self._node("Gather", reads[0], self.graph.constant(list(step.options["channels"])), axis=1)
        if step.kind == "slice":
            first = step.options["first"]
            return self._node("Slice", reads[0], *(self.graph.constant([n]) for n in (first, first + step.shape[1], 1)))
        if step.kind == "identity":
            return self._node("Reshape", reads[0], self.graph.constant([0, *step.shape[1:]]))
        (by_h, by_w), (c, h, w) = step.options["by"], step.shape[1:]
        if step.kind == "upsample":
            rows = self._node("Gather", reads[0], self.graph.constant(np.repeat(np.arange(h // by_h), by_h)), axis=2)
            return self._node("Gather", rows, self.graph.constant(np.repeat(np.arange(w // by_w), by_w)), axis=3)
        blocks = self._node("Reshape", reads[0], self.graph.constant([0, by_h, by_w, c, h // by_h, w // by_w]))
        transposed = self._node("Transpose", blocks, perm=[0, 3, 4, 1, 5, 2])
        return self._node("Reshape", transposed, self.graph.constant([0, c, h, w]))

    def _float_step(self, step: Any, reads: list[str]) -> str:
        """Write an operation that runs in float between quantized values."""
        node, batch = step.node, self.model.graph.batch
        names = dict(zip(node.reads(), reads, strict=True))

        def name_of(value: Any) -> str:
            return (
                names[value] if isinstance(value, Value) else str(self.graph.constant(value, np.asarray(value).dtype))
            )

        emission = Emission(self.graph, node, [name_of(v) for v in node.inputs], name_of)
        emission.batch_input = self.real[0]
        emission.other_shape = tuple(n + (n == batch and at == 0) for at, n in enumerate(node.shape))
        write = EMITTERS.get(node.operation.__name__)
        if write is None:
            raise ConfigurationError(f"{step.name} runs {node.operation.__name__} in float, which has no form in ONNX")
        return write(emission)

    def _conv(self, step: Any, layer: Any, x: str) -> str:
        """Write a convolution with int8 weights and an int32 bias, or with float ones."""
        settings: dict[str, Any] = {"strides": list(step.stride), "pads": list(step.padding), "group": step.groups}
        settings["dilations"] = list(step.dilation)
        if layer is None:
            weights = [self._float(step.name, n, getattr(step, n)) for n in ("weight", "bias")]
            return self._node("Conv", x, *filter(None, weights), **settings)
        q = layer.kernel.weights()  # (O, kh, kw, C / groups)
        weight = np.ascontiguousarray(q.transpose(0, 3, 1, 2))
        bias = layer.offset.astype(np.int64) + layer.operand.zero_point * q.reshape(len(q), -1).astype(np.int64).sum(1)
        names = [self._weight(step.name, weight, layer.weight_scale), self._bias(step.name, bias, layer)]
        return self._node("Conv", x, *names, **settings)

    def _linear(self, step: Any, layer: Any, x: str) -> str:
        """Write a linear layer with int8 weights, or with float ones."""
        if layer is None:
            weights = [self._float(step.name, n, getattr(step, n)) for n in ("weight", "bias")]
            return str(self.graph.node("Gemm", [x, *filter(None, weights)], transB=1))
        q = self._channels_first(step, layer.kernel.weights()[:, 0, 0, : layer.in_features])
        weight = self._weight(step.name, q, layer.weight_scale)
        transposed = self.graph.node("Transpose", [weight], perm=[1, 0])
        y = self.graph.node("MatMul", [x, transposed])
        if layer.float_bias is None:
            return str(y)
        return str(self.graph.node("Add", [y, self._float(step.name, "bias", layer.float_bias)]))

    def _channels_first(self, step: Any, q: Array) -> Array:
        """Return the weights after a flattened image in the order (C, H, W); the layer stores them as (H, W, C)."""
        image = self.model.channels_last_image(step.inputs[0])
        if not image:
            return np.ascontiguousarray(q)
        c, h, w = image
        return np.ascontiguousarray(q.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(len(q), -1))

    def _weight(self, name: str, q: Array, scale: Array) -> str:
        integers = self.graph.weight(q, f"{name}.weight")
        zero = self.graph.weight(np.zeros(len(q), q.dtype), f"{name}.weight_zero_point")
        scales = self.graph.weight(np.broadcast_to(scale, (len(q),)).astype(np.float32), f"{name}.weight_scale")
        return str(self.graph.node("DequantizeLinear", [integers, scales, zero], axis=0))

    def _bias(self, name: str, steps: Array, layer: Any) -> str:
        integers = self.graph.weight(steps.astype(np.int32), f"{name}.bias")
        scale = np.broadcast_to(layer.weight_scale, (len(steps),)).astype(np.float64) * layer.operand.scale
        scales = self.graph.weight(scale.astype(np.float32), f"{name}.bias_scale")
        zero = self.graph.weight(np.zeros(len(steps), np.int32), f"{name}.bias_zero_point")
        return str(self.graph.node("DequantizeLinear", [integers, scales, zero], axis=0))

    def _float(self, step: str, name: str, value: Array | None) -> str:
        return "" if value is None else self.graph.weight(value, f"{step}.{name}")
