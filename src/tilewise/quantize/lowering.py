"""Lowering table: the integer implementation of each kind of step, and the quantization parameters of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.graph.ir import Array, Op
from tilewise.graph.ops import Quantization, kinds_with
from tilewise.quantize import operators
from tilewise.quantize.calibration import Calibration
from tilewise.quantize.graph import NATIVE_NORMS, FloatGraph
from tilewise.quantize.layers import Geometry, QuantizedConv2d, QuantizedLinear, corrected_bias
from tilewise.quantize.parameters import AffineParameters, INT8Quantizer, affine_from_range, int16_weights

if TYPE_CHECKING:
    from tilewise.quantize.model import QuantizedModel

Stored = dict[str, Array] | None  # the arrays of a layer that was read from a file
Lower = Callable[["QuantizedModel", int, Op, Stored], Any]
# Operators whose results have the quantization parameters of their input.
KEEPS_PARAMETERS = kinds_with(Quantization.INPUT)
# Operators for whose sake alone a float input is not quantized.
MOVES_VALUES = (*kinds_with(Quantization.INPUT, Quantization.SHARED), "global_mean")


class IntegerLayerCache:
    """Cache of integer layers for the candidate models of a search, which share most of their layers."""

    _MAX_VARIANTS = 4  # of one layer; arbitrary, a search needs its last two or three

    def __init__(self) -> None:
        self._variants: dict[int, list[tuple[tuple[Any, ...], list[Array | None], Any]]] = {}

    def get(self, index: int, key: tuple[Any, ...], arrays: list[Array | None], build: Callable[[], Any]) -> Any:
        """Return operator `index`'s layer for these settings (`key`) and arrays; `build` it if not cached."""
        variants = self._variants.setdefault(index, [])
        for known_key, known_arrays, layer in variants:
            if known_key == key and all(map(_same_array, known_arrays, arrays)):
                return layer
        layer = build()
        self._variants[index] = [*variants[1 - self._MAX_VARIANTS :], (key, arrays, layer)]
        return layer


def _same_array(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _lower_conv(model: QuantizedModel, index: int, step: Op, stored: Stored) -> QuantizedConv2d:
    """Create the integer convolution of operator `index` from its float weights, or from `stored` arrays of a file."""
    source, output, padding = model.affine[step.inputs[0]], model.affine[index], model.padding_of(index)
    settings: dict[str, Any] = {
        "input": source,
        "output": output,
        "activation": step.activation,
        "residual": model.affine[step.inputs[1]] if len(step.inputs) > 1 else None,
        "out_padding": padding,
    }
    if stored is not None:
        geometry = Geometry(step.stride, step.padding, step.groups, step.dilation)
        integers = (stored["q"], stored["scale"], stored["offset"])
        return QuantizedConv2d.from_integers(*integers, geometry=geometry, **settings)
    weight, bias, means = step.weight, step.bias, model.mean_of(step.inputs[0])
    assert weight is not None

    def build() -> QuantizedConv2d:
        """Quantize the float weights to an integer convolution; GPTQ rounds them if its products are int8."""
        return QuantizedConv2d.from_weights(
            weight,
            bias,
            stride=step.stride,
            padding=step.padding,
            groups=step.groups,
            dilation=step.dilation,
            means=means,
            rounded=None if source.is_int16 else model.rounded_weights(index),
            **settings,
        )

    # A cached layer is the same if its settings, weights, bias and channel means are.
    key = (*settings.values(), not source.is_int16 and model.uses_gptq)
    layer: QuantizedConv2d = model.layers.get(index, key, [weight, bias, means], build)
    return layer


def _lower_linear(model: QuantizedModel, index: int, step: Op, stored: Stored) -> QuantizedLinear:
    """Create the integer linear layer of operator `index` from its float weights, or from `stored` arrays of a file.

    The network's last layer returns float32, which needs no requantization.
    """
    source, last = model.affine[step.inputs[0]], index == len(model.graph.steps) - 1
    output = None if last and step.activation in ("", "relu") else model.affine[index]
    settings: dict[str, Any] = {"input": source, "output": output, "activation": step.activation}
    if stored is not None:
        return QuantizedLinear.from_integers(stored["q"], stored["scale"], stored.get("bias"), **settings)
    weight, bias, means = step.weight, step.bias, model.mean_of(step.inputs[0])
    assert weight is not None

    def build() -> QuantizedLinear:
        """Quantize the float weights and bias to an integer linear layer."""
        corrected = bias
        # Bias correction needs the weights as they will be rounded, in the module's order of inputs.
        if means is not None:
            int8_weights = INT8Quantizer().quantize_weights
            rounded = int16_weights(weight, bias, source) if source.is_int16 else int8_weights(weight)
            corrected = corrected_bias(weight, rounded.dequantize(), bias, means)
        return QuantizedLinear.from_weights(_weights_in_stored_order(model, step), corrected, **settings)

    key = (*settings.values(), model.channels_last_image(step.inputs[0]))
    layer: QuantizedLinear = model.layers.get(index, key, [weight, bias, means], build)
    return layer


def _weights_in_stored_order(model: QuantizedModel, step: Op) -> Array:
    """Return a linear layer's weights with columns in the order in which its input, a flattened image, is stored.

    That is (H, W, C) if the flattened image is stored channels-last, else the module's (C, H, W).
    """
    assert step.weight is not None
    shape = model.channels_last_image(step.inputs[0])
    if not shape:
        return step.weight
    return step.weight.reshape(-1, *shape).transpose(0, 2, 3, 1).reshape(len(step.weight), -1)


def _flatten(model: QuantizedModel, index: int, step: Op, _stored: Stored) -> Any:
    image = model.calibration.shapes[step.inputs[0]]
    return operators.QuantizedFlatten(image if len(image) == 3 else (), model.keeps_channels_last(index))


def _lower_affine(model: QuantizedModel, index: int, step: Op, stored: Stored) -> Any:
    """Create the per-channel scale-and-shift operator from float arrays, or from `stored` arrays of a file."""
    arrays = stored if stored is not None else {"weight": step.weight, "bias": step.bias}
    scale = arrays.get("weight")
    scale = np.ones(step.shape[1], np.float32) if scale is None else scale
    return operators.Affine(model.affine[index], model.padding_of(index), step, scale, arrays.get("bias"))


def _operator(operator: type[operators.IntegerOp]) -> Lower:
    return lambda model, index, step, _: operator(model.affine[index], model.padding_of(index), step)


LOWERING_TABLE: dict[str, Lower] = {
    **dict.fromkeys((*KEEPS_PARAMETERS, "concat"), _operator(operators.Movement)),
    "conv": _lower_conv,
    "linear": _lower_linear,
    "affine": _lower_affine,
    "flatten": _flatten,
    "global_mean": _operator(operators.GlobalPool),
    "avg_pool": _operator(operators.AvgPool),
    **dict.fromkeys(("add", "sub"), _operator(operators.QuantizedAdd)),
    "mul": _operator(operators.QuantizedMultiply),
}


def unsupported_reason(model: QuantizedModel, step: Op) -> str | None:
    """Explain why an operator must stay in float; None if it has an integer form."""
    # A norm between integer steps is quantized for its readers anyway.
    in_float = [model.integer[i] is None and model.graph.steps[i].kind not in NATIVE_NORMS for i in step.inputs]
    if step.kind in MOVES_VALUES and all(in_float):
        return "its inputs are float32"
    if step.kind not in LOWERING_TABLE:
        name = step.kind if step.node is None else step.node.operation.__name__
        shape = ", ".join(["N", *(str(size) for i in step.inputs[:1] for size in model.calibration.shapes[i])])
        return f"{name} of inputs ({shape}) has no integer form"
    # Integer operators work on images (C, H, W) and rows (K).
    shapes = [model.calibration.shapes[i] for i in step.inputs]
    if step.kind == "linear" and len(shapes[0]) != 1:
        return "its inputs are not rows, (N, K)"
    if any(len(shape) not in (1, 3) for shape in shapes):
        return "its inputs are neither images nor rows"
    if not all(np.isfinite(a).all() for a in (step.weight, step.bias) if a is not None):
        return "its weights hold NaN or infinity"
    return None


def tied_values(graph: FloatGraph) -> list[int]:
    """Return, for every operator, the first operator of its group of tied quantization parameters.

    Operators that only move values keep the parameters of their input. Inputs of a concatenation share one scale, so
    that each can be computed directly into the result. Groups are joined by union-find.
    """
    root = list(range(len(graph.steps)))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for index, step in enumerate(graph.steps):
        tied_inputs = step.inputs[:1] if step.kind in KEEPS_PARAMETERS else ()
        for source in step.inputs if step.kind == "concat" else tied_inputs:
            a, b = sorted((find(index), find(source)))
            root[b] = a
    return [find(i) for i in range(len(graph.steps))]


def shared_parameters(graph: FloatGraph, calibration: Calibration) -> list[AffineParameters]:
    """Return the uint8 parameters of every operator's result; tied values share the union of their ranges."""
    group_of = tied_values(graph)
    members_of: dict[int, list[int]] = {}
    for index, step in enumerate(graph.steps):
        if step.kind not in KEEPS_PARAMETERS:
            members_of.setdefault(group_of[index], []).append(index)
    parameters = {}
    for group, members in members_of.items():
        # One member keeps the observer's choice; several share the union of their ranges.
        ranges = [calibration.ranges[i] for i in members]
        union = affine_from_range(min(low for low, _ in ranges), max(high for _, high in ranges))
        parameters[group] = calibration.parameters[members[0]] if len(members) == 1 else union
    return [parameters[group] for group in group_of]
