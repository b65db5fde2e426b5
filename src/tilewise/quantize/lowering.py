"""Lowering table: the integer implementation of each kind of step, and the quantization parameters of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.graph.ir import Op
from tilewise.quantize.calibration import Calibration
from tilewise.quantize.elementwise import (
    Affine,
    Concat,
    GatherChannels,
    QuantizedAdd,
    QuantizedDepthToSpace,
    QuantizedMultiply,
    QuantizedSubtract,
    QuantizedUpsample,
    Same,
    Slice,
)
from tilewise.quantize.graph import NATIVE_NORMS, FloatGraph
from tilewise.quantize.layers import Geometry, QuantizedConv2d, QuantizedLinear, corrected_bias
from tilewise.quantize.parameters import AffineParameters, INT8Quantizer, affine_from_range, wide_weights
from tilewise.quantize.pooling import AvgPool, GlobalPool, MaxPool, QuantizedFlatten

if TYPE_CHECKING:
    from tilewise.quantize.convert import QuantizedModel

Array = npt.NDArray[Any]
Stored = dict[str, Array] | None
# Operators that only move or compare values: their results have the quantization parameters of their input.
KEEPS = ("max_pool", "avg_pool", "flatten", "slice", "gather_channels", "upsample", "depth_to_space", "identity")
MOVES = (*KEEPS, "concat", "global_mean")  # nothing is gained by quantizing for their sake


class LayerCache:
    """Integer layers that candidate models share: a layer is built again only if something it is built from differs."""

    _MAX_VARIANTS = 4  # of one layer; arbitrary, a search needs its last two or three

    def __init__(self) -> None:
        self._variants: dict[int, list[tuple[tuple[Any, ...], list[Array | None], Any]]] = {}

    def get(self, index: int, key: tuple[Any, ...], arrays: list[Array | None], build: Callable[[], Any]) -> Any:
        """Return the layer of step `index` with these settings, weights, bias and means of its inputs."""
        variants = self._variants.setdefault(index, [])
        for known_key, known_arrays, layer in variants:
            if known_key == key and all(map(_same_array, known_arrays, arrays)):
                return layer
        layer = build()
        self._variants[index] = [*variants[1 - self._MAX_VARIANTS :], (key, arrays, layer)]
        return layer


def _same_array(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _conv(model: QuantizedModel, index: int, step: Op, stored: Stored) -> QuantizedConv2d:
    """Build an integer convolution from float weights, or from the arrays of a file."""
    source, output, border = model.affine[step.inputs[0]], model.affine[index], model.padding_of(index)
    residual = model.affine[step.inputs[1]] if len(step.inputs) > 1 else None
    if stored is not None:
        geometry = Geometry(step.stride, step.padding, step.groups, step.dilation)
        integers = (stored["q"], stored["scale"], stored["offset"])
        return QuantizedConv2d.restored(*integers, source, output, geometry, step.activation, residual, border)
    weight, bias, means = step.weight, step.bias, model.mean_of(step.inputs[0])
    assert weight is not None

    def build() -> QuantizedConv2d:
        settings = (source, output, step.stride, step.padding, False, residual, border)
        options: dict[str, Any] = {"groups": step.groups, "dilation": step.dilation, "means": means}
        options["rounded"] = None if source.is_int16 else model.rounded(index)
        return QuantizedConv2d.from_weights(weight, bias, *settings, activation=step.activation, **options)

    key = (source, output, residual, border, step.activation, not source.is_int16 and model.uses_gptq)
    layer: QuantizedConv2d = model.layers.get(index, key, [weight, bias, means], build)
    return layer


def _linear(model: QuantizedModel, index: int, step: Op, stored: Stored) -> QuantizedLinear:
    """Build an integer linear layer. The network's last one gives float32, which needs no requantization."""
    source, last = model.affine[step.inputs[0]], index == len(model.graph.steps) - 1
    output = None if last and step.activation in ("", "relu") else model.affine[index]
    relu = step.activation == "relu"
    if stored is not None:
        arguments = (stored["q"], stored["scale"], stored.get("bias"), source, output, relu, step.activation)
        return QuantizedLinear.restored(*arguments)
    bias, means, weight = step.bias, model.mean_of(step.inputs[0]), step.weight
    assert weight is not None

    def build() -> QuantizedLinear:
        corrected = bias
        if means is not None:
            # Bias correction (Nagel et al. 2019, section 4.2): remove the mean error that rounded weights cause.
            int8_weights = INT8Quantizer().quantize_weights
            rounded = wide_weights(weight, bias, source) if source.is_int16 else int8_weights(weight)
            corrected = corrected_bias(weight, rounded.dequantize(), bias, means)
        ordered = _channels_last(model, step)
        return QuantizedLinear.from_weights(ordered, corrected, source, output, relu, activation=step.activation)

    key = (source, output, step.activation, model.channels_last_image(step.inputs[0]))
    layer: QuantizedLinear = model.layers.get(index, key, [weight, bias, means], build)
    return layer


def _elementwise(model: QuantizedModel, index: int, step: Op, stored: Stored) -> Any:
    """Build the integer form of a pool, an elementwise operator or one that moves values."""
    output, border, options = model.affine[index], model.padding_of(index), step.options
    if step.kind in ("max_pool", "avg_pool"):
        pool = MaxPool if step.kind == "max_pool" else AvgPool
        return pool(step.kernel, step.stride, step.padding, border, options.get("count_padding", True))
    if step.kind == "global_mean":
        return GlobalPool(model.affine[step.inputs[0]], output, len(step.shape) == 2, border)
    if step.kind in ("add", "sub", "mul"):
        return {"add": QuantizedAdd, "sub": QuantizedSubtract, "mul": QuantizedMultiply}[step.kind](
            output, border, step.activation
        )
    if step.kind == "affine":
        arrays = stored if stored is not None else {"weight": step.weight, "bias": step.bias}
        one = np.ones(step.shape[1], np.float32)
        scale, shift = arrays.get("weight"), arrays.get("bias")
        return Affine(output, border, one if scale is None else scale, shift, step.activation)
    if step.kind == "slice":
        return Slice(output, border, options["first"], step.shape[1])
    if step.kind == "gather_channels":
        return GatherChannels(output, border, tuple(options["channels"]))
    if step.kind in ("upsample", "depth_to_space"):
        return (QuantizedUpsample if step.kind == "upsample" else QuantizedDepthToSpace)(
            output, border, tuple(options["by"])
        )
    if step.kind == "identity":
        return Same(output, border, len(step.shape) == 2)
    if step.kind == "concat":
        return Concat(output, border)
    image = model.calibration.shapes[step.inputs[0]]
    return QuantizedFlatten(image if len(image) == 3 else (), model.keeps_channels_last(index))


def unsupported_reason(model: QuantizedModel, step: Op) -> str | None:
    """Explain why an operator must stay in float; None if it has an integer form."""
    # A norm between integer steps is quantized for its readers anyway.
    in_float = [model.integer[i] is None and model.graph.steps[i].kind not in NATIVE_NORMS for i in step.inputs]
    if step.kind in MOVES and all(in_float):
        return "its inputs are float32"
    if step.kind == "python":
        assert step.node is not None
        return f"{step.node.operation.__name__} has no integer form"
    if step.kind not in FORMS:
        return f"{step.kind} has no integer form"
    shapes = [model.calibration.shapes[i] for i in step.inputs]
    if step.kind == "linear" and len(shapes[0]) != 1:
        return "its inputs are not rows, (N, K)"
    if any(len(shape) not in (1, 3) for shape in shapes):
        return "its inputs are neither images nor rows"
    if not all(np.isfinite(a).all() for a in (step.weight, step.bias) if a is not None):
        return "its weights hold NaN or infinity"
    return None


def _channels_last(model: QuantizedModel, step: Op) -> Array:
    """Weights (O, C H W) of a linear layer in the stored order of its input: (O, H W C) for a row that kept it."""
    assert step.weight is not None
    shape = model.channels_last_image(step.inputs[0])
    if not shape:
        return step.weight
    return step.weight.reshape(-1, *shape).transpose(0, 2, 3, 1).reshape(len(step.weight), -1)


Form = Callable[["QuantizedModel", int, Op, Stored], Any]
FORMS: dict[str, Form] = {
    "conv": _conv,
    "linear": _linear,
    **dict.fromkeys((*MOVES, "add", "sub", "mul", "affine"), _elementwise),
}


def tied_values(graph: FloatGraph) -> list[int]:
    """Return for every operator the first one of its group of tied quantization parameters.

    Operators that move values keep the parameters of their input. Inputs of a concatenation share one scale, so that
    each can be computed directly into the result. Groups are joined by union-find.
    """
    root = list(range(len(graph.steps)))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for index, step in enumerate(graph.steps):
        for source in step.inputs if step.kind == "concat" else step.inputs[:1] if step.kind in KEEPS else ():
            a, b = sorted((find(index), find(source)))
            root[b] = a
    return [find(i) for i in range(len(graph.steps))]


def shared_parameters(graph: FloatGraph, calibration: Calibration) -> list[AffineParameters]:
    """Return the int8 parameters of every operator's result; tied values share the union of their ranges."""
    family_of = tied_values(graph)
    own: dict[int, list[int]] = {}
    for index, step in enumerate(graph.steps):
        if step.kind not in KEEPS:
            own.setdefault(family_of[index], []).append(index)
    parameters = {}
    for family, members in own.items():
        ranges = [calibration.ranges[i] for i in members]
        union = affine_from_range(min(low for low, _ in ranges), max(high for _, high in ranges))
        parameters[family] = calibration.parameters[members[0]] if len(members) == 1 else union
    return [parameters[f] for f in family_of]
