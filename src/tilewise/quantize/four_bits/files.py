"""Files of four-bit models: safetensors with two weights per byte, the scales of the blocks, and the float tensors.

A file holds arrays, no code: it is loaded into a model of the same architecture.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.io import load_arrays, save
from tilewise.nn import Module
from tilewise.quantize.four_bits import FourBitLinear, watch
from tilewise.quantize.four_bits.blocks import BLOCK, Blocks

Array = npt.NDArray[Any]
_FORMAT = "tilewise four-bit model 1"


def save_four_bits(model: Module, path: str | os.PathLike[str]) -> None:
    """Write a model that `quantize(model, bits=4)` returned; `load_four_bits` restores the same numbers."""
    arrays = {name: tensor.data for name, tensor in model.named_tensors()}
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, FourBitLinear)]
    if not layers:
        raise ConfigurationError("this model has no four-bit layer; tilewise.save writes float models")
    for name, layer in layers:
        arrays |= {f"{name}.{what}": array for what, array in _arrays(layer).items()}
    save(arrays, path, {"format": _FORMAT})


def load_four_bits(model: Module, path: str | os.PathLike[str]) -> Module:
    """Return a copy of the float `model` with the four-bit layers and tensors of a file of `save_four_bits`.

    >>> from tilewise import models
    >>> from tilewise.quantize import quantize
    >>> save_four_bits(quantize(models.mlp(), bits=4), "/tmp/mlp4.safetensors")
    >>> load_four_bits(models.mlp(), "/tmp/mlp4.safetensors")(np.zeros((2, 64), np.float32)).shape
    (2, 10)
    """
    arrays, metadata = load_arrays(path)
    if metadata.get("format") != _FORMAT:
        raise FileFormatError(f"{path} does not hold a four-bit model")
    out = copy.deepcopy(model).eval()
    places = watch(out)
    names = {id(module): name for name, module in out.named_modules()}
    # Replace every linear layer by the four-bit layer of the file, then fill the tensors that stayed float.
    for parent, child in places:
        watched: Any = getattr(parent, child)
        layer_arrays = {what: arrays.pop(f"{names[id(watched)]}.{what}", None) for what in _PARTS}
        setattr(parent, child, FourBitLinear(*_layer(layer_arrays, watched.linear.weight.shape, path)))
    for name, tensor in out.named_tensors():
        array = arrays.pop(name, None)
        if array is None or array.shape != tensor.shape:
            raise FileFormatError(
                f"{path} holds a model of another architecture: {name} is missing or of another shape"
            )
        tensor.data = array.astype(tensor.data.dtype)
    # Arrays that nothing used belong to layers that this model does not have.
    if arrays:
        raise FileFormatError(
            f"{path} holds a model of another architecture: this one has no tensor {sorted(arrays)[0]}"
        )
    return out


_PARTS = ("codes", "scales", "minimums", "column_scale", "bias")


def _arrays(layer: FourBitLinear) -> dict[str, Array]:
    """Return the arrays of a layer as they are stored."""
    blocks = layer.blocks()
    even = np.pad(blocks.codes, ((0, 0), (0, blocks.codes.shape[1] % 2)))
    arrays = {
        "codes": even[:, 0::2] | even[:, 1::2] << 4,  # two per byte, the first in the low half
        "scales": blocks.scales,
        "minimums": blocks.minimums,
        "column_scale": blocks.column_scale,
        "bias": layer.float_bias,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def _layer(
    arrays: dict[str, Array | None], shape: tuple[int, ...], path: str | os.PathLike[str]
) -> tuple[Blocks, Array | None]:
    """Check the arrays of a layer with this weight shape and build its blocks and bias."""
    outputs, inputs = shape
    blocks = -(-inputs // BLOCK)
    expected = {
        "codes": (outputs, -(-inputs // 2)),
        "scales": (outputs, blocks),
        "minimums": (outputs, blocks),
        "column_scale": (outputs,),
        "bias": (outputs,),
    }
    # Symmetric layers have no minimums, and any layer may lack a bias.
    for name, array in arrays.items():
        missing = array is None and name not in ("minimums", "bias")
        if missing or (array is not None and (array.shape != expected[name] or not _fits(name, array))):
            raise FileFormatError(f"{path} holds a model of another architecture, or invalid {name}")
    packed = arrays["codes"]
    scales, minimums, unit, bias = (arrays[name] for name in _PARTS[1:])
    assert packed is not None and scales is not None and unit is not None
    codes = np.empty((outputs, 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    halves = None if minimums is None else minimums.astype(np.float16)
    result = Blocks(np.ascontiguousarray(codes[:, :inputs]), scales.astype(np.float16), halves, unit.astype(np.float32))
    return result, None if bias is None else bias.astype(np.float32)


def _fits(name: str, array: Array) -> bool:
    """Tell whether a stored array has a valid type and finite values."""
    return array.dtype == np.uint8 if name == "codes" else array.dtype.kind == "f" and bool(np.isfinite(array).all())
