"""Quantized models on disk: one safetensors file with int8 weights, and in its metadata the steps and their scales."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.io import load_arrays, save
from tilewise.quantize.calibration import Calibration
from tilewise.quantize.convert import QuantizedModel
from tilewise.quantize.graph import Graph, Step
from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear
from tilewise.quantize.parameters import AffineParameters

Array = npt.NDArray[Any]
_FORMAT = "tilewise quantized model 1"
_KINDS = ("input", "conv", "linear", "max_pool", "avg_pool", "global_pool", "flatten")


def save_quantized(model: QuantizedModel, path: str | os.PathLike[str]) -> None:
    """Write the model; `load_quantized` reads it back to the same bytes."""
    arrays: dict[str, Array] = {}
    for index, (step, layer) in enumerate(zip(model.graph.steps, model.integer, strict=True)):
        if step.kind == "float":
            raise ConfigurationError(
                f"{step.name} is a layer of its own kind that runs in float; it cannot be saved here"
            )
        for name, array in _arrays(step, layer).items():
            arrays[f"{index}.{name}"] = array
    c = model.calibration
    facts = {
        "steps": [_facts(step) for step in model.graph.steps],
        "kept": model.kept,
        "observer": c.observer,
        "samples": c.samples,
        "parameters": [[p.scale, p.zero_point] for p in c.parameters],
        "ranges": c.ranges,
        "shapes": c.shapes,
    }
    save(arrays, path, {"format": _FORMAT, "model": json.dumps(facts)})


def holds_quantized(path: str | os.PathLike[str]) -> bool:
    """Whether a safetensors file is one that `save_quantized` wrote."""
    return load_arrays(path)[1].get("format") == _FORMAT


def load_quantized(path: str | os.PathLike[str]) -> QuantizedModel:
    """A model written by `save_quantized`."""
    arrays, metadata = load_arrays(path)
    if metadata.get("format") != _FORMAT:
        raise FileFormatError(f"{path} does not hold a quantized model")
    try:
        facts = json.loads(metadata["model"])
        steps = [_step(entry) for entry in facts["steps"]]
        calibration = Calibration(
            str(facts["observer"]),
            tuple(step.name for step in steps),
            tuple(AffineParameters(float(s), int(z)) for s, z in facts["parameters"]),
            tuple((float(low), float(high)) for low, high in facts["ranges"]),
            tuple(tuple(int(n) for n in shape) for shape in facts["shapes"]),
            int(facts["samples"]),
        )
        kept = {str(name): str(reason) for name, reason in facts["kept"].items()}
        return QuantizedModel(Graph(steps), calibration, kept, _by_step(arrays))
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, AssertionError, RecursionError):
        raise FileFormatError(f"{path} holds a quantized model that does not fit together") from None


def _arrays(step: Step, layer: Any) -> dict[str, Array]:
    if isinstance(layer, QuantizedConv2d):
        return {"q": layer.kernel.weights(), "scale": layer.weight_scale, "offset": layer.offset}
    if isinstance(layer, QuantizedLinear):
        held = {"q": layer.kernel.weights()[:, 0, 0], "scale": layer.weight_scale}
        return held if layer.float_bias is None else held | {"bias": layer.float_bias}
    return {name: a for name, a in (("weight", step.weight), ("bias", step.bias)) if a is not None}


def _facts(step: Step) -> dict[str, Any]:
    names = ("kind", "name", "inputs", "stride", "padding", "kernel", "groups", "relu")
    return {name: getattr(step, name) for name in names}


def _step(entry: dict[str, Any]) -> Step:
    pairs = {name: tuple(int(n) for n in entry[name]) for name in ("inputs", "stride", "padding", "kernel")}
    if entry["kind"] not in _KINDS or any(
        len(pairs[n]) != 2 or min(pairs[n]) < 0 for n in ("stride", "padding", "kernel")
    ):
        raise ValueError
    return Step(str(entry["kind"]), str(entry["name"]), **pairs, groups=int(entry["groups"]), relu=bool(entry["relu"]))  # type: ignore[arg-type]


def _by_step(arrays: dict[str, Array]) -> dict[int, dict[str, Array]]:
    out: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        index, what = name.split(".")
        out.setdefault(int(index), {})[what] = np.ascontiguousarray(array)
    return out
