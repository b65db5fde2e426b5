"""Pruning combined with INT8: prune, then quantize.

Pruned weights are zero in int8 as well, because weights are quantized symmetrically (zero point 0). `SparseInt8Linear`
stores only the non-zero int8 weights and multiplies them with activations that are quantized dynamically, row by row;
the int32 sums are exact. Like `SparseLinear` it times itself against the dense INT8 layer and uses the faster one.

`save_pruned` writes a quantized model with one bit per weight and the non-zero int8 values.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise._files import parse_json
from tilewise.errors import FileFormatError, ShapeError
from tilewise.io import load_arrays, save
from tilewise.nn import Linear
from tilewise.prune.bitmask import pack_sparse, unpack_sparse
from tilewise.prune.masks import checked_weights
from tilewise.prune.sparse_layer import SparseMatrixLayer
from tilewise.quantize import INT8Quantizer, QuantizedLinear, QuantizedModel, load_quantized, save_quantized

Array = npt.NDArray[Any]
_MODEL_FORMAT = "tilewise pruned quantized model 1"
_MAX_METADATA_BYTES = 1 << 23  # limit of the decompressed metadata of a file


class SparseInt8Linear(SparseMatrixLayer):
    """Linear layer with sparse int8 weights (out, in), one scale per output, float input and output."""

    description, format = "a sparse int8 layer", "tilewise sparse int8 linear 1"
    sizes = (1, 4, 16, 64)

    def __init__(self, q: Array, scale: Array, bias: Array | None = None, always_sparse: bool = False) -> None:
        """Check the shapes and pack the non-zero weights."""
        q = np.ascontiguousarray(q)
        if q.ndim != 2 or q.dtype != np.int8:
            raise ShapeError(f"the weights must be an int8 matrix, not {q.dtype} of shape {q.shape}")
        if np.shape(scale) != (len(q),) or (bias is not None and np.shape(bias) != (len(q),)):
            raise ShapeError(f"{len(q)} outputs need {len(q)} scales, and {len(q)} biases or none")
        self._describe(q, bias, always_sparse)
        self.scale = np.ascontiguousarray(scale, np.float32)
        kind = _NumpySparseInt8 if native is None else native.SparseInt8Weights
        self._kernel = kind(q, self.scale, self.float_bias)

    @classmethod
    def from_dense(cls, linear: Linear, always_sparse: bool = False) -> SparseInt8Linear:
        """Quantize a pruned nn.Linear. `always_sparse` uses the sparse kernel even if it is slower."""
        weights = INT8Quantizer().quantize_weights(checked_weights(linear.weight.data))
        bias = None if linear.bias is None else linear.bias.data
        return cls(weights.q, weights.scale, bias, always_sparse)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and bias, including the dense weights if they are faster."""
        return int(self._kernel.nbytes + (0 if self._dense is None else self._dense.nbytes))

    def _dense_product(self, rows: Array, relu: bool) -> Array:
        """Compute the layer by the dense INT8 kernel, whose weights are unpacked once."""
        if self._dense is None:
            self._dense = QuantizedLinear.from_integers(self.weights(), self.scale, self.float_bias)
        out: Array = self._dense(rows, activation="relu" if relu else None).data
        return out

    def _extra_arrays(self) -> dict[str, Array]:
        return {"scale": self.scale}

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Array]) -> Self:
        return cls(unpack_sparse(arrays, np.int8), arrays["scale"], arrays.get("bias"))


class _NumpySparseInt8:
    """NumPy version of the sparse INT8 kernel: the same integers, by a dense product."""

    def __init__(self, q: Array, scale: Array, bias: Array | None) -> None:
        self._q, self._scale, self._bias = q.copy(), scale, bias
        self.nbytes = q.nbytes + scale.nbytes + (0 if bias is None else bias.nbytes)

    def sums(self, x: Array) -> Array:
        total: Array = x.astype(np.int32) @ self._q.T.astype(np.int32)
        return total

    def multiply(self, x: Array, relu: bool) -> Array:
        """Quantize each row symmetrically to int8, multiply, and dequantize."""
        row_max = np.where(np.isnan(x), np.float32(0), np.abs(x)).max(-1, initial=0, keepdims=True)
        inverse_scale = np.divide(np.float32(127), row_max, out=np.zeros_like(row_max), where=row_max > 0)
        with np.errstate(invalid="ignore"):
            q = np.rint(np.nan_to_num(x * inverse_scale)).astype(np.int8)
        sums = self.sums(q.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], len(self._q))
        out: Array = sums.astype(np.float32) * (self._scale * (row_max / np.float32(127)))
        out = out if self._bias is None else out + self._bias
        return np.maximum(out, 0) if relu else out

    def to_dense(self) -> Array:
        return self._q.copy()


# --- files of whole models ---


def save_pruned(model: QuantizedModel, path: str | os.PathLike[str]) -> None:
    """Write a pruned and quantized model compactly; `load_pruned` reads back the same integers."""
    with tempfile.TemporaryDirectory() as folder:
        dense_file = Path(folder) / "plain.safetensors"
        save_quantized(model, dense_file)
        arrays, metadata = load_arrays(dense_file)
    packed: dict[str, Array] = {}
    for name, array in arrays.items():
        # The bitmask takes an eighth of the int8 array, so packing pays off from 12.5 % zeros on.
        if array.dtype == np.int8 and np.count_nonzero(array) < 0.8 * array.size:
            packed |= pack_sparse(array, f"{name}|")
        else:
            packed[name] = array
    compressed = zlib.compress(json.dumps(metadata, separators=(",", ":")).encode(), 9)
    save(packed | {"facts": np.frombuffer(compressed, np.uint8)}, path, {"format": _MODEL_FORMAT})


def load_pruned(path: str | os.PathLike[str]) -> QuantizedModel:
    """Load a model written by `save_pruned`."""
    arrays, metadata = load_arrays(path)
    if metadata.get("format") != _MODEL_FORMAT or "facts" not in arrays:
        raise FileFormatError(f"{path} does not contain a pruned and quantized model")
    try:
        text = zlib.decompressobj().decompress(arrays["facts"].tobytes(), _MAX_METADATA_BYTES)
        model_metadata = parse_json(text, path)
        dense = {name: array for name, array in arrays.items() if "|" not in name and name != "facts"}
        for name in {name.split("|")[0] for name in arrays if "|" in name}:
            dense[name] = unpack_sparse(arrays, np.int8, f"{name}|")
        with tempfile.TemporaryDirectory() as folder:
            dense_file = Path(folder) / "plain.safetensors"
            save(dense, dense_file, {str(k): str(v) for k, v in model_metadata.items()})
            model: QuantizedModel = load_quantized(dense_file)
            return model
    except (KeyError, ValueError, TypeError, AttributeError, zlib.error, RecursionError, FileFormatError):
        raise FileFormatError(f"{path} contains an inconsistent pruned and quantized model") from None
