"""Quantized models on disk: one safetensors file with int8 weights, and in its metadata the steps and their scales."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.graph.ir import Op
from tilewise.io import load_arrays, save
from tilewise.nn import Module
from tilewise.quantize.calibration import Calibration, is_quantized
from tilewise.quantize.convert import QuantizedModel
from tilewise.quantize.elementwise import Affine
from tilewise.quantize.files.traced import NodeReader, NodeWriter, TracedModel, decoded_trace, encoded_trace
from tilewise.quantize.graph import NATIVE_NORMS, FloatGraph
from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear
from tilewise.quantize.lowering import MOVES
from tilewise.quantize.parameters import WIDEST, AffineParameters
from tilewise.quantize.reference import BENT, is_leaky, leaky_slope
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
_FORMAT = "tilewise quantized model 2"
_WITH_WIDE = "tilewise quantized model 3"  # some activations have 16 bits
_BEFORE = "tilewise quantized model 1"  # pairs of padding, no activation but ReLU
_FORMATS = (_WITH_WIDE, _FORMAT, _BEFORE)
# Version of the rule for the order of flattened images (`QuantizedModel.keeps_channels_last`). Files without it were
# written when every flattened image kept (H, W, C): only right where linear layers alone read it.
_FLATTEN_LAYOUT = 2
_TRACED = "tilewise traced quantized model 1"  # dynamically quantized: a list of operations
_KINDS = ("input", "conv", "linear", "add", "mul", "affine", "sub", *NATIVE_NORMS, "python", *MOVES)
# What reading a damaged or hostile file may raise.
_MISFITS = (
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
ACTIVATIONS = ("", "relu", "relu6", *BENT)  # and LeakyReLU with its slope
# Kinds of ops as files name them: files keep the names of the first release.
_STORED_KINDS = {"gather_channels": "take", "depth_to_space": "spread", "identity": "same"}
_KIND_OF_STORED = {"global_pool": "global_mean", **{stored: kind for kind, stored in _STORED_KINDS.items()}}


def save_quantized(model: Module, path: str | os.PathLike[str], example: Any = None) -> None:
    """Write a quantized model; `load_quantized` reads it back to the same integers.

    A dynamically quantized model (a transformer) is written as the operations that it runs on `example`, an input or a
    list of inputs with a batch in front. Networks read from ONNX files, and models that `quantize` was given data for,
    need none.
    """
    if isinstance(model, TracedModel) or not isinstance(model, QuantizedModel):
        _save_traced(model, path, example)
        return
    arrays: dict[str, Array] = {}
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
    facts = {
        "steps": [_facts(step) for step in model.graph.steps],
        "kept": model.float_reasons,
        "observer": c.observer,
        "samples": c.samples,
        "parameters": [[p.scale, p.zero_point] for p in c.parameters],
        "ranges": c.ranges,
        "shapes": c.shapes,
        "wide": model.int16_reasons,
        "numbers": {family: [p.scale, p.most] for family, p in model.numbers.items()},
        "flatten_layout": _FLATTEN_LAYOUT,
        "batch": model.graph.batch,
        "nodes": nodes,
        "measured_error": model.measured_error,
        "stated_error": model.stated_error,
    }
    save(arrays, path, {"format": _WITH_WIDE if model.int16_reasons else _FORMAT, "model": json.dumps(facts)})


def _save_traced(model: Module, path: str | os.PathLike[str], example: Any) -> None:
    if not is_quantized(model):
        raise ConfigurationError(f"{type(model).__name__} is not quantized: call quantize first")
    arrays: dict[str, Array] = {}
    facts = encoded_trace(model, _examples(model, example), arrays)
    save(arrays, path, {"format": _TRACED, "model": json.dumps(facts)})


def _examples(model: Module, example: Any) -> list[Array]:
    """Inputs of two images or sequences each."""
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
    """Whether a safetensors file is one that `save_quantized` wrote of a statically quantized model."""
    return load_arrays(path)[1].get("format") in _FORMATS


def load_quantized(path: str | os.PathLike[str]) -> Any:
    """A model written by `save_quantized`: a QuantizedModel, or a TracedModel where it was dynamically quantized."""
    arrays, metadata = load_arrays(path)
    if metadata.get("format") == _TRACED:
        return _load_traced(path, arrays, metadata)
    if metadata.get("format") not in _FORMATS:
        raise FileFormatError(f"{path} does not hold a quantized model")
    try:
        facts = json.loads(metadata["model"])
        shapes = [tuple(int(n) for n in shape) for shape in facts["shapes"]]
        steps = [_step(entry, shape, at) for at, (entry, shape) in enumerate(zip(facts["steps"], shapes, strict=True))]
        calibration = Calibration(
            str(facts["observer"]),
            tuple(step.name for step in steps),
            tuple(AffineParameters(float(s), int(z)) for s, z in facts["parameters"]),
            tuple((float(low), float(high)) for low, high in facts["ranges"]),
            tuple(shapes),
            int(facts["samples"]),
        )
        if facts.get("flatten_layout") != _FLATTEN_LAYOUT and _has_old_flatten(steps):
            raise FileFormatError(
                f"{path} was written by an older version that confused the order of flattened images: quantize it again"
            )
        float_reasons = {str(name): str(reason) for name, reason in facts["kept"].items()}
        int16_reasons = {int(index): str(reason) for index, reason in facts.get("wide", {}).items()}
        for index, entry in facts.get("nodes", {}).items():
            steps[int(index)].node = NodeReader(arrays).node(entry)
        if any((step.kind == "python") != (step.node is not None) for step in steps):
            raise ValueError
        graph = FloatGraph(steps, int(facts.get("batch", 0)))
        numbers = _numbers(facts, int16_reasons)
        model = QuantizedModel(graph, calibration, float_reasons, _by_step(arrays), int16_reasons, numbers=numbers)
        for step, layer in zip(steps, model.integer, strict=True):
            if layer is None and step.kind in ("conv", "linear", *NATIVE_NORMS) and step.weight is None:
                raise ValueError  # left in float, and no float weight came with it
        model.measured_error, model.stated_error = (
            _error_of(facts, f"{name}_error") for name in ("measured", "stated")
        )
        return model
    except FileFormatError:
        raise
    except _MISFITS:
        raise FileFormatError(f"{path} holds a quantized model that does not fit together") from None


def _error_of(facts: dict[str, Any], name: str) -> float | None:
    """An error that was stored with the model; None in files from before it was, or if there was no `max_error`."""
    value = facts.get(name)
    if value is None:
        return None
    error = float(value)
    if not 0 <= error < np.inf:
        raise ValueError
    return error


def _load_traced(path: str | os.PathLike[str], arrays: dict[str, Array], metadata: dict[str, str]) -> TracedModel:
    try:
        return decoded_trace(json.loads(metadata["model"]), arrays)
    except _MISFITS:
        raise FileFormatError(f"{path} holds a quantized model that does not fit together") from None


def _has_old_flatten(steps: list[Op]) -> bool:
    """Whether something other than a linear layer reads a flattened image."""
    flattened = {i for i, step in enumerate(steps) if step.kind == "flatten"}
    return any(step.kind != "linear" and flattened & set(step.inputs) for step in steps)


def _numbers(facts: dict[str, Any], int16_reasons: dict[int, str]) -> dict[int, AffineParameters]:
    """Read the parameters of int16 values; files without them are no longer read."""
    facts = facts.get("numbers", {})
    parameters = {int(at): AffineParameters(float(scale), 0, int(most)) for at, (scale, most) in facts.items()}
    valid = all(0 < p.scale < np.inf and 0 < p.most <= WIDEST for p in parameters.values())
    if set(parameters) != set(int16_reasons) or not valid:
        raise ValueError
    return parameters


def model_arrays(step: Op, layer: Any) -> dict[str, Array]:
    if isinstance(layer, QuantizedConv2d):
        return {"q": layer.kernel.weights(), "scale": layer.weight_scale, "offset": layer.offset}
    if isinstance(layer, QuantizedLinear):
        held = {"q": layer.kernel.weights()[:, 0, 0], "scale": layer.weight_scale}
        return held if layer.float_bias is None else held | {"bias": layer.float_bias}
    numbers = (layer.scale, layer.shift) if isinstance(layer, Affine) else (step.weight, step.bias)
    return {name: a for name, a in zip(("weight", "bias"), numbers, strict=True) if a is not None}


def _facts(step: Op) -> dict[str, Any]:
    facts = {name: getattr(step, name) for name in ("name", "inputs", "activation", "options")}
    return {"kind": _STORED_KINDS.get(step.kind, step.kind), **facts}


_SIZES = {
    "kernel": (2, 2),
    "stride": (2, 2),
    "dilation": (2, 2),
    "by": (2, 2),
    "padding": (2, 4),
    "channels": (1, 1 << 20),
}


def _is_activation(name: str) -> bool:
    return name in ACTIVATIONS or (is_leaky(name) and 0 < leaky_slope(name) < 1)


def _step(entry: dict[str, Any], shape: tuple[int, ...], at: int) -> Op:
    kind = _KIND_OF_STORED.get(entry["kind"], entry["kind"])
    options = (
        entry["options"] if "options" in entry else {n: entry[n] for n in ("stride", "padding", "kernel", "groups")}
    )
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name in _SIZES:
            read[name] = tuple(int(n) for n in value)
            low, high = _SIZES[name]
            if not low <= len(read[name]) <= high or min(read[name]) < 0:
                raise ValueError
        elif name in ("groups", "first", "count_padding"):
            read[name] = bool(value) if name == "count_padding" else int(value)
        elif name == "eps":
            read[name] = float(value)
    if len(read.get("padding", (0,) * 4)) == 2:
        read["padding"] = (*read["padding"], *read["padding"])
    inputs = tuple(int(i) for i in entry["inputs"])
    activation = str(entry["activation"]) if "activation" in entry else "relu" if entry["relu"] else ""
    if kind not in _KINDS or not _is_activation(activation) or not all(0 <= i < at for i in inputs):
        raise ValueError
    if len(inputs) != (0 if at == 0 else 1) and kind not in ("conv", "add", "sub", "mul", "concat", "python"):
        raise ValueError
    if (kind == "input") != (at == 0) or (kind == "conv" and len(shape) != 3):
        raise ValueError
    return Op(kind, inputs, (1, *shape), str(entry["name"]), activation, options=read)


def _by_step(arrays: dict[str, Array]) -> dict[int, dict[str, Array]]:
    out: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        index, what = name.split(".")
        if what.startswith("n"):  # of an operation's node
            continue
        out.setdefault(int(index), {})[what] = np.ascontiguousarray(array)
    return out
