"""Operators with weights or windows: convolutions, linear layers, norms and pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.backend.registry import current_backend
from tilewise.graph.ir import Array, Op, Shape
from tilewise.graph.op_specs.functions import activated, write_activation
from tilewise.graph.op_specs.spec import EmitContext, OnnxForm, OpSpec, Quantization
from tilewise.graph.passes.patterns import ChannelNorm, GroupNorm
from tilewise.ops.base import Operation

Emit = Callable[[EmitContext, Op, list[int]], int]

# --- convolutions and linear layers ---


def _tuned_algorithm(op: Op, x: Shape) -> str:
    """Return the convolution algorithm that was measured fastest on this machine for input shape `x`; "" without one.

    Only 3×3 filters with stride 1 have several algorithms.
    """
    chooser, (top, left, bottom, right) = current_backend().tile_chooser, op.padding
    plain = op.kernel == (3, 3) and op.stride == op.dilation == (1, 1) and (top, left) == (bottom, right)
    if chooser is None or not plain or len(x) != 4 or x[0] == 0:
        return ""
    tile = chooser("conv2d", (*x, op.shape[1], 3, 3, 1, 1, top, left, op.groups), "float32", "nchw")
    return str(getattr(tile, "algorithm", ""))


def _emit_conv(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add a convolution, with its tuned algorithm if any, to the native graph; return its value number."""
    layer = context.weights(op)
    algorithm = op.algorithm or _tuned_algorithm(op, context.shape(op.inputs[0]))
    value = int(context.plan.conv(layer, *operands, algorithm=algorithm))
    layer.release()  # the plan has packed the weights
    return value


def _conv(op: Op, x: Array, residual: Array | None = None) -> Array:
    """Compute a convolution of x (N, C, H, W) in NumPy, with its bias, optional residual and activation."""
    # Backends take (height, width) if both sides have the same padding, which more kernels support.
    options = {"stride": op.stride, "padding": op.padding, "groups": op.groups, "dilation": op.dilation}
    if op.padding[:2] == op.padding[2:]:
        options["padding"] = op.padding[:2]
    out: Array = current_backend().dispatch("conv2d", x, op.weight, op.bias, **options)
    return activated(out if residual is None else out + residual, op.activation)


def _write_conv(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    """Write a convolution as ONNX nodes: Conv, an Add for a residual, and the activation."""
    settings: dict[str, Any] = {"strides": list(op.stride), "pads": list(op.padding), "group": op.groups}
    y = form.node("Conv", inputs[0], *form.weights(op), **settings, dilations=list(op.dilation))
    for other in inputs[1:]:
        y = form.node("Add", y, other)
    return write_activation(form, y, op.activation)


def _emit_linear(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add a linear layer to the native plan and return its value number."""
    # Over tokens a linear layer is a 1×1 convolution.
    if len(op.shape) != 2:
        return _emit_conv(context, op, operands)
    return int(context.plan.linear(context.weights(op), *operands, algorithm=op.algorithm))


def _linear(op: Op, x: Array) -> Array:
    assert op.weight is not None
    return activated(current_backend().dispatch("matmul", x, op.weight.T, bias=op.bias), op.activation)


def _write_linear(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    return write_activation(form, form.node("Gemm", inputs[0], *form.weights(op), transB=1), op.activation)


# --- norms ---


def _emit_norm(context: EmitContext, op: Op, operands: list[int]) -> int:
    """Add a norm with weight, bias, eps (and groups) to the native graph and return its value number."""
    add = getattr(context.plan, {"channel_norm": "layer_norm"}.get(op.kind, op.kind))
    groups = [op.options["groups"]] if "groups" in op.options else []
    weights = [array.tolist() for array in (op.weight, op.bias) if array is not None]
    return int(add(operands[0], *groups, *weights, op.options["eps"]))


def _norm(operation: type[Operation]) -> Callable[[Op, Array], Array]:
    """Return the reference function of a norm; it calls the native operator, so that results are bit-equal."""

    def reference(op: Op, x: Array) -> Array:
        """Run the native norm on an array; the compiled extension is required."""
        if native is None or x.size == 0 or x.ndim != 4:
            return np.asarray(operation().forward(x, op.weight, op.bias, **op.options))
        plan = native.Graph()
        plan.output(_emit_norm(EmitContext(plan), op, [plan.input(*x.shape)]))
        result: Array = plan.run([np.ascontiguousarray(x, np.float32)])[0]
        return result

    return reference


def _write_channel_norm(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    """Write a layer norm over the channels of images as Transpose, LayerNormalization, Transpose."""
    channels_last = form.node("Transpose", inputs[0], perm=[0, 2, 3, 1])
    norm = form.node("LayerNormalization", channels_last, *form.weights(op), axis=-1, epsilon=op.options["eps"])
    return form.node("Transpose", norm, perm=[0, 3, 1, 2])


def _write_group_norm(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    """Write a group norm as an instance norm that has each group of channels as one channel."""
    groups, constant = op.options["groups"], form.graph.constant
    weights = form.weights(op)
    ones, zeros = (constant([value] * groups, np.float32) for value in (1, 0))
    rows = form.node("Reshape", inputs[0], constant([0, groups, -1]))
    norm = form.node("InstanceNormalization", rows, ones, zeros, epsilon=op.options["eps"])
    image = form.node("Reshape", norm, constant([0, *op.shape[1:]]))
    weight, bias = (form.node("Reshape", name, constant([1, -1, 1, 1])) for name in weights)
    return form.node("Add", form.node("Mul", image, weight), bias)


# --- recurrent layers ---


def _emit_recurrent(context: EmitContext, op: Op, operands: list[int]) -> int:
    assert op.weight is not None and op.bias is not None
    weight, bias = (np.ascontiguousarray(a, np.float32) for a in (op.weight.T, op.bias))
    return int(context.plan.recurrent(operands, **op.options, weight=weight, bias=bias))


# --- pools ---


def _emit_pool(mean: bool) -> Emit:
    return lambda c, op, x: int(c.plan.pool(x[0], mean=mean, out_padding=c.padding, **op.options))


def pool_windows(op: Op, x: Array, fill: float) -> Array:
    """Pad images (N, C, H, W) with `fill` and return a pool's windows as a view (N, C, H', W', kh, kw)."""
    top, left, bottom, right = op.padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(padded, op.kernel, (2, 3))
    return np.asarray(windows[:, :, :: op.stride[0], :: op.stride[1]])


def mean_divisor(op: Op, x: Array) -> Array | int:
    """Return what an average pool divides each window's sum by: its size, or its pixels inside the image."""
    if op.options.get("count_padding", True):
        return op.kernel[0] * op.kernel[1]
    return np.asarray(pool_windows(op, np.ones_like(x), 0).sum((4, 5), dtype=np.int32))


def _max_pool(op: Op, x: Array) -> Array:
    """Max-pool float or integer images (N, C, H, W); padding may differ on each of the four sides."""
    top, left, bottom, right = op.padding
    is_float, even = x.dtype.kind == "f", (top, left) == (bottom, right)
    # The backend pads both sides by the same amount, at most half a window.
    if is_float and even and 2 * top <= op.kernel[0] and 2 * left <= op.kernel[1]:
        settings = {"kernel": op.kernel, "stride": op.stride, "padding": (top, left)}
        return np.asarray(current_backend().dispatch("max_pool2d", np.ascontiguousarray(x), **settings)[0])
    # Padding must never win: it is the smallest number.
    return np.asarray(pool_windows(op, x, -np.inf if is_float else np.iinfo(x.dtype).min).max((4, 5)))


def _avg_pool(op: Op, x: Array) -> Array:
    return np.asarray(pool_windows(op, x, 0).sum((4, 5), dtype=np.float32) / np.float32(mean_divisor(op, x)))


def _window_settings(op: Op) -> dict[str, Any]:
    return {"kernel_shape": list(op.kernel), "strides": list(op.stride), "pads": list(op.padding)}


def _write_avg_pool(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    count = int(op.options.get("count_padding", True))
    return form.node("AveragePool", inputs[0], **_window_settings(op), count_include_pad=count)


def _global_mean(op: Op, x: Array) -> Array:
    return np.asarray(x.mean((2, 3), dtype=np.float32).reshape(len(x), x.shape[1], *op.shape[2:]))


def _write_global_mean(form: OnnxForm, op: Op, inputs: list[str]) -> str:
    mean = form.node("GlobalAveragePool", inputs[0])
    return form.node("Flatten", mean, axis=1) if len(op.shape) == 2 else mean


LAYERS = {
    # Layers with packed weights.
    "conv": OpSpec(_emit_conv, "conv2d", _conv, _write_conv, Quantization.OWN),
    "linear": OpSpec(_emit_linear, "matmul", _linear, _write_linear, Quantization.OWN),
    # int8 weights, every row of floats quantized by its own scale
    "int8_linear": OpSpec(
        lambda c, op, x: int(c.plan.dynamic_linear(op.options["layer"], *x, activation=op.activation))
    ),
    "layer_norm": OpSpec(_emit_norm),
    # The layer norm of every pixel of an image (N, C, H, W).
    "channel_norm": OpSpec(_emit_norm, "layer_norm", _norm(ChannelNorm), _write_channel_norm, Quantization.FLOAT),
    "group_norm": OpSpec(_emit_norm, "", _norm(GroupNorm), _write_group_norm, Quantization.FLOAT),
    "rms_norm": OpSpec(_emit_norm),
    # One direction of an LSTM, GRU or RNN, from the products of its input (passes/lower_tokens.py).
    "recurrent": OpSpec(_emit_recurrent),
    "max_pool": OpSpec(
        _emit_pool(False),
        "max_pool2d",
        _max_pool,
        lambda form, op, x: form.node("MaxPool", x[0], **_window_settings(op)),
        Quantization.INPUT,
    ),
    "avg_pool": OpSpec(_emit_pool(True), "avg_pool2d", _avg_pool, _write_avg_pool, Quantization.INPUT),
    "global_mean": OpSpec(
        lambda c, _op, x: int(c.plan.global_mean(x[0])), "mean", _global_mean, _write_global_mean, Quantization.OWN
    ),
}
