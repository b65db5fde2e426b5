"""Files of quantized models: a safetensors file with the integer weights, and the steps with their scales as metadata.

Dynamically quantized models are stored as the operations that they run (`tilewise.quantize.traced_files`).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.graph.ir import Array, Node, Op
from tilewise.graph.op_specs.functions import is_leaky, leaky_slope
from tilewise.graph.ops import Quantization, kinds_with
from tilewise.io import load_arrays, save
from tilewise.nn import Module
from tilewise.ops.shapes import Reshape
from tilewise.quantize.calibration import Calibration, is_quantized
from tilewise.quantize.graph import NATIVE_NORMS, BatchInteger, FloatGraph
from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear
from tilewise.quantize.model import QuantizedModel
from tilewise.quantize.operators import Affine
from tilewise.quantize.parameters import INT16_MAX, AffineParameters
from tilewise.quantize.reference import ACTIVATION_FUNCTIONS
from tilewise.quantize.traced_files import NodeReader, NodeWriter, TracedModel, decode_trace, encode_trace
from tilewise.tensor import Tensor

_FORMAT = "tilewise quantized model 3"
_TRACED = "tilewise traced quantized model 1"  # dynamically quantized: a list of operations
_KINDS = ("input", "python", *kinds_with(*Quantization))
# Exceptions that reading a damaged or hostile file may raise.
_READ_ERRORS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError)
ACTIVATIONS = ("", "relu", "relu6", *ACTIVATION_FUNCTIONS)  # and LeakyReLU with its slope
# Kinds of ops as files name them: files keep the names of the first release.
_STORED_KINDS = {"gather_channels": "take", "depth_to_space": "spread", "identity": "same"}
_KIND_OF_STORED = {stored: kind for kind, stored in _STORED_KINDS.items()}


def save_quantized(model: Module, path: str | os.PathLike[str], example: Any = None) -> None:
    """Write a quantized model; `load_quantized` reads it back to the same integers.

    A dynamically quantized model (a transformer) is written as the operations that it runs on `example`, an input or a
    list of inputs with a batch in front. Networks read from ONNX files, and models that `quantize` was given data for,
    need none.
    """
    arrays: dict[str, Array] = {}
    if isinstance(model, QuantizedModel):
        form, facts = _FORMAT, _encode_model(model, arrays)
    elif is_quantized(model):
        form, facts = _TRACED, encode_trace(model, _examples(model, example), arrays)
    else:
        raise ConfigurationError(f"{type(model).__name__} is not quantized: call quantize first")
    save(arrays, path, {"format": form, "model": json.dumps(facts)})


def _encode_model(model: QuantizedModel, arrays: dict[str, Array]) -> dict[str, Any]:
    """Return the JSON metadata of a model file.

    The model's arrays are added to `arrays` under the names `<operator index>.<name>`.
    """
    nodes: dict[int, Any] = {}
    for index, (step, layer) in enumerate(zip(model.graph.steps, model.integer, strict=True)):
        if step.kind == "python":
            assert step.node is not None
            nodes[index] = NodeWriter(arrays, f"{index}.n").node(step.node)
            continue
        for name, array in model_arrays(step, layer).items():
            arrays[f"{index}.{name}"] = array
        if model.equalization is not None and model.equalization[index].max(initial=1.0) > 1:
            arrays[f"{index}.by"] = model.equalization[index].astype(np.float32)
    c = model.calibration
    return {
        "steps": [_op_metadata(step) for step in model.graph.steps],
        "kept": model.float_reasons,
        "observer": c.observer,
        "samples": c.samples,
        "parameters": [[p.scale, p.zero_point] for p in c.parameters],
        "ranges": c.ranges,
        "shapes": c.shapes,
        "wide": model.int16_reasons,
        "numbers": {group: [p.scale, p.int16_limit] for group, p in model.int16_by_group.items()},
        "batch": model.graph.batch,
        "any_batch": model.graph.any_batch,
        "any_size": model.graph.any_size,
        "nodes": nodes,
        "measured_error": model.measured_error,
        "stated_error": model.stated_error,
    }


def _examples(model: Module, example: Any) -> list[Array]:
    """Return the inputs to trace a dynamically quantized model with: `example`, or those stored in the model.

    Raises ConfigurationError if there are neither.
    """
    if example is None and isinstance(model, TracedModel):
        example = [np.zeros(shape, dtype) for dtype, shape in model.inputs]
    if example is None:
        example = getattr(model, "quantization_example", None)
    if example is None and hasattr(model, "example"):
        try:
            example = model.example(2)
        except TilewiseError:
            example = model.example(1)
    if example is None:
        raise ConfigurationError("a dynamically quantized model is saved with an example: save_quantized(m, path, x)")
    inputs = example if isinstance(example, list | tuple) else [example]
    return [np.ascontiguousarray(x.data if isinstance(x, Tensor) else x) for x in inputs]


def holds_quantized(path: str | os.PathLike[str]) -> bool:
    """Tell whether a safetensors file holds a statically quantized model that `save_quantized` wrote."""
    return load_arrays(path)[1].get("format") == _FORMAT


def load_quantized(path: str | os.PathLike[str]) -> Any:
    """Read a model written by `save_quantized`: a QuantizedModel, or a TracedModel if it was dynamically quantized."""
    arrays, metadata = load_arrays(path)
    decode = {_FORMAT: _decode_model, _TRACED: decode_trace}.get(metadata.get("format", ""))
    if decode is None:
        raise FileFormatError(f"{path} does not hold a quantized model")
    try:
        return decode(json.loads(metadata["model"]), arrays)
    except FileFormatError:
        raise
    except _READ_ERRORS:
        raise FileFormatError(f"{path} holds a quantized model that does not fit together") from None


def _decode_model(facts: dict[str, Any], arrays: dict[str, Array]) -> QuantizedModel:
    """Build a model from the metadata and arrays of a file; raise one of `_READ_ERRORS` if they are damaged."""
    shapes = [tuple(int(n) for n in shape) for shape in facts["shapes"]]
    steps = [_read_op(entry, shape, at) for at, (entry, shape) in enumerate(zip(facts["steps"], shapes, strict=True))]
    calibration = Calibration(
        observer=str(facts["observer"]),
        names=tuple(step.name for step in steps),
        parameters=tuple(AffineParameters(float(s), int(z)) for s, z in facts["parameters"]),
        ranges=tuple((float(low), float(high)) for low, high in facts["ranges"]),
        shapes=tuple(shapes),
        samples=int(facts["samples"]),
    )
    int16_reasons = {int(index): str(reason) for index, reason in facts["wide"].items()}
    # A "python" step is a traced operation, and no other step has one.
    for index, entry in facts["nodes"].items():
        node = NodeReader(arrays).node(entry)
        steps[int(index)].node = node if "any_batch" in facts else _with_first_axis(node, int(facts["batch"]))
    if any((step.kind == "python") != (step.node is not None) for step in steps):
        raise ValueError
    model = QuantizedModel(
        FloatGraph(steps, int(facts["batch"]), bool(facts.get("any_batch", True)), bool(facts.get("any_size", False))),
        calibration,
        {str(name): str(reason) for name, reason in facts["kept"].items()},
        stored=_group_by_op(arrays),
        int16_reasons=int16_reasons,
        int16_by_group=_read_int16_parameters(facts["numbers"], int16_reasons),
    )
    # Layers that conversion left in float need float weights, which only the file can supply.
    for step, layer in zip(steps, model.integer, strict=True):
        if layer is None and step.kind in ("conv", "linear", *NATIVE_NORMS) and step.weight is None:
            raise ValueError
    model.measured_error, model.stated_error = (_read_error(facts, f"{name}_error") for name in ("measured", "stated"))
    return model


def _with_first_axis(node: Node, batch: int) -> Node:
    """Let the first axis of a shape follow the batch: files of version 0.1.0 do not say which numbers do."""
    shape = node.shape if node.operation is Reshape else node.params.get("shape")
    if not shape or shape[0] % batch or (shape[0] != batch and node.operation is not Reshape):
        return node
    return replace(node, params={**node.params, "shape": (BatchInteger(shape[0] // batch, 0), *shape[1:])})


def _read_error(facts: dict[str, Any], name: str) -> float | None:
    """Read the stored error `name` from the metadata; None if none was stored. ValueError if it is invalid."""
    value = facts[name]
    if value is None:
        return None
    error = float(value)
    if not 0 <= error < np.inf:
        raise ValueError
    return error


def _read_int16_parameters(facts: dict[str, Any], int16_reasons: dict[int, str]) -> dict[int, AffineParameters]:
    """Read the int16 parameters of each group of tied activations from the metadata, by group.

    ValueError unless exactly the groups of `int16_reasons` have valid parameters.
    """
    parameters = {int(at): AffineParameters(float(scale), 0, int(limit)) for at, (scale, limit) in facts.items()}
    valid = all(0 < p.scale < np.inf and 0 < p.int16_limit <= INT16_MAX for p in parameters.values())
    if set(parameters) != set(int16_reasons) or not valid:
        raise ValueError
    return parameters


def model_arrays(step: Op, layer: Any) -> dict[str, Array]:
    """Return the arrays that a file stores for an operator: those of its integer layer, or else its float weights."""
    if isinstance(layer, QuantizedConv2d):
        return {"q": layer.kernel.weights(), "scale": layer.weight_scale, "offset": layer.offset}
    if isinstance(layer, QuantizedLinear):
        arrays = {"q": layer.kernel.weights()[:, 0, 0], "scale": layer.weight_scale}
        return arrays if layer.float_bias is None else arrays | {"bias": layer.float_bias}
    coefficients = (layer.scale, layer.shift) if isinstance(layer, Affine) else (step.weight, step.bias)
    return {name: a for name, a in zip(("weight", "bias"), coefficients, strict=True) if a is not None}


def _op_metadata(step: Op) -> dict[str, Any]:
    """Return an operator's kind, name, inputs, activation and options as the dictionary stored in the metadata."""
    facts = {name: getattr(step, name) for name in ("name", "inputs", "activation", "options")}
    return {"kind": _STORED_KINDS.get(step.kind, step.kind), **facts}


# Options that are tuples, with their smallest and largest length.
_LENGTHS = {
    "kernel": (2, 2),
    "stride": (2, 2),
    "dilation": (2, 2),
    "by": (2, 2),
    "padding": (4, 4),
    "channels": (1, 1 << 20),
}


_OPTION_TYPES: dict[str, type] = {"groups": int, "first": int, "count_padding": bool, "eps": float}


def _read_op(entry: dict[str, Any], shape: tuple[int, ...], at: int) -> Op:
    """Read operator number `at` from its metadata `entry`; `shape` is that of its result without the batch.

    ValueError if it is invalid or reads an operator that is not before it.
    """
    kind = _KIND_OF_STORED.get(entry["kind"], entry["kind"])
    options: dict[str, Any] = {}
    for name, value in entry["options"].items():
        if name in _LENGTHS:
            options[name] = tuple(int(n) for n in value)
            low, high = _LENGTHS[name]
            if not low <= len(options[name]) <= high or min(options[name]) < 0:
                raise ValueError
        elif name in _OPTION_TYPES:
            options[name] = _OPTION_TYPES[name](value)
    inputs = tuple(int(i) for i in entry["inputs"])
    activation = str(entry["activation"])
    is_activation = activation in ACTIVATIONS or (is_leaky(activation) and 0 < leaky_slope(activation) < 1)
    if kind not in _KINDS or not is_activation or not all(0 <= i < at for i in inputs):
        raise ValueError
    # Only these kinds read more than one value.
    if len(inputs) != (0 if at == 0 else 1) and kind not in ("conv", "add", "sub", "mul", "concat", "python"):
        raise ValueError
    # The first step, and no other, is the input; convolutions work on images (C, H, W).
    if (kind == "input") != (at == 0) or (kind == "conv" and len(shape) != 3):
        raise ValueError
    return Op(kind, inputs, (1, *shape), str(entry["name"]), activation, options=options)


def _group_by_op(arrays: dict[str, Array]) -> dict[int, dict[str, Array]]:
    """Group the arrays of a file, which are named `<operator index>.<name>`, by operator index and name."""
    out: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        index, what = name.split(".")
        if what.startswith("n"):  # an array of a traced operation
            continue
        out.setdefault(int(index), {})[what] = np.ascontiguousarray(array)
    return out
