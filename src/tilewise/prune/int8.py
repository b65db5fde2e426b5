"""Pruning together with INT8: prune, then quantize.

Weights that pruning set to zero are zero in int8 too, since the scale of weights has no zero point. `SparseInt8Linear`
keeps only the others, as int8, and multiplies them with activations that become integers row by row as they come; the
sums are exact in 32 bits. Like its float sister it times itself against the dense int8 layer and uses the faster one.

`save_pruned` writes a quantized model with one bit per weight and the int8 values that are not zero.
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
from tilewise.prune.bits import packed_arrays, unpacked_array
from tilewise.prune.choice import SparseLayer, refuse_gradient
from tilewise.prune.masks import checked_weights
from tilewise.quantize import INT8Quantizer, QuantizedLinear, QuantizedModel, load_quantized, save_quantized
from tilewise.tensor import Tensor, _wrap

Array = npt.NDArray[Any]
_MODEL_FORMAT = "tilewise pruned quantized model 1"
_MOST_FACTS = 1 << 23  # bytes of description that a file may unfold to
_MOST_SHAPES = 1000


class SparseInt8Linear(SparseLayer):
    """y = x @ weight.T + bias with sparse int8 weights (out, in), a scale per output, floats in and out."""

    called, format = "a sparse int8 layer", "tilewise sparse int8 linear 1"
    sizes = (1, 4, 16, 64)

    def __init__(self, q: Array, scale: Array, bias: Array | None = None, always_sparse: bool = False) -> None:
        q = np.ascontiguousarray(q)
        if q.ndim != 2 or q.dtype != np.int8:
            raise ShapeError(f"int8 weights are an int8 matrix, not {q.dtype} of shape {q.shape}")
        if np.shape(scale) != (len(q),) or (bias is not None and np.shape(bias) != (len(q),)):
            raise ShapeError(f"{len(q)} outputs have a scale each, and a bias each or none")
        super().__init__(q, bias, always_sparse)
        self.out_features, self.in_features = q.shape
        self.scale = np.ascontiguousarray(scale, np.float32)
        kind = _NumpySparseInt8 if native is None else native.SparseInt8Weights
        self._kernel = kind(q, self.scale, self.float_bias)
        self._sparse_shapes: set[tuple[int, ...]] = set()  # shapes of input for which the sparse product is chosen

    @classmethod
    def from_dense(cls, linear: Linear, always_sparse: bool = False) -> SparseInt8Linear:
        """From a pruned nn.Linear; `always_sparse` takes the sparse kernel without asking whether it pays."""
        weights = INT8Quantizer().quantize_weights(checked_weights(linear.weight.data))
        bias = None if linear.bias is None else linear.bias.data
        return cls(weights.q, weights.scale, bias, always_sparse)

    def weights(self) -> Array:
        """The int8 weights (out, in), zeros included."""
        q: Array = self._kernel.to_dense()
        return q

    @property
    def nbytes(self) -> int:
        """Bytes the weights, scales and bias take; a dense copy kept because it is faster counts too."""
        return int(self._kernel.nbytes + (0 if self._dense is None else self._dense.nbytes))

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        refuse_gradient(x)
        values = x.data if isinstance(x, Tensor) else x
        plain = residual is None and (activation is None or activation == "relu")
        if plain and getattr(values, "shape", None) in self._sparse_shapes:
            out = self._kernel.multiply(values, activation is not None)
            if out is not None:
                return _wrap(out)
        return self._any(np.ascontiguousarray(values, np.float32), activation, residual)

    def _any(self, values: Array, activation: str | None, residual: Any) -> Tensor:
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"SparseInt8Linear takes (..., {self.in_features}), not {values.shape}")
        fused = activation == "relu" and residual is None
        dense = self._is_dense(values)
        if not dense and len(self._sparse_shapes) < _MOST_SHAPES:
            self._sparse_shapes.add(values.shape)
        product = self._dense_product(values, fused) if dense else self._kernel.multiply(values, fused)
        return self._finished(product, activation, residual, fused)

    def _is_dense(self, x: Array) -> bool:
        rows = x.size // self.in_features if self.in_features else 0
        if self.always_sparse or not rows:
            return False
        return self._choose(
            self._size_of(rows),
            lambda: self._kernel.multiply(x, False),
            lambda: self._dense_product(x, False),
            f"batch {rows}",
        )

    def _dense_product(self, x: Array, relu: bool) -> Array:
        if self._dense is None:
            self._dense = QuantizedLinear.restored(self.weights(), self.scale, self.float_bias, None, None, False)
        out: Array = self._dense(x, activation="relu" if relu else None).data
        return out

    def _weights(self) -> Array:
        return self.weights()

    def _beside(self) -> dict[str, Array]:
        return {"scale": self.scale}

    @classmethod
    def _restored(cls, arrays: dict[str, Array]) -> Self:
        return cls(unpacked_array(arrays, np.int8), arrays["scale"], arrays.get("bias"))


class _NumpySparseInt8:
    """The kernel's interface where it is not built: the same integers, with the zeros among them."""

    def __init__(self, q: Array, scale: Array, bias: Array | None) -> None:
        self._q, self._scale, self._bias = q.copy(), scale, bias
        self.nbytes = q.nbytes + scale.nbytes + (0 if bias is None else bias.nbytes)

    def sums(self, x: Array) -> Array:
        total: Array = x.astype(np.int32) @ self._q.T.astype(np.int32)
        return total

    def multiply(self, x: Array, relu: bool) -> Array:
        largest = np.where(np.isnan(x), np.float32(0), np.abs(x)).max(-1, initial=0, keepdims=True)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        with np.errstate(invalid="ignore"):
            q = np.rint(np.nan_to_num(x * inverse)).astype(np.int8)
        sums = self.sums(q.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], len(self._q))
        out: Array = sums.astype(np.float32) * (self._scale * (largest / np.float32(127)))
        out = out if self._bias is None else out + self._bias
        return np.maximum(out, 0) if relu else out

    def to_dense(self) -> Array:
        return self._q.copy()


# --- whole models on disk ---


def save_pruned(model: QuantizedModel, path: str | os.PathLike[str]) -> None:
    """Write a pruned and quantized model compactly; `load_pruned` reads it back to the same integers."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.safetensors"
        save_quantized(model, plain)
        arrays, metadata = load_arrays(plain)
    packed: dict[str, Array] = {}
    for name, array in arrays.items():
        if array.dtype == np.int8 and np.count_nonzero(array) < 0.8 * array.size:
            packed |= packed_arrays(array, f"{name}|")
        else:
            packed[name] = array
    facts = zlib.compress(json.dumps(metadata, separators=(",", ":")).encode(), 9)
    save(packed | {"facts": np.frombuffer(facts, np.uint8)}, path, {"format": _MODEL_FORMAT})


def load_pruned(path: str | os.PathLike[str]) -> QuantizedModel:
    """A model written by `save_pruned`."""
    arrays, metadata = load_arrays(path)
    if metadata.get("format") != _MODEL_FORMAT or "facts" not in arrays:
        raise FileFormatError(f"{path} does not hold a pruned and quantized model")
    try:
        unfold = zlib.decompressobj()
        facts = parse_json(unfold.decompress(arrays["facts"].tobytes(), _MOST_FACTS), path)
        plain = {name: array for name, array in arrays.items() if "|" not in name and name != "facts"}
        for name in {name.split("|")[0] for name in arrays if "|" in name}:
            plain[name] = unpacked_array(arrays, np.int8, f"{name}|")
        with tempfile.TemporaryDirectory() as folder:
            unpacked = Path(folder) / "plain.safetensors"
            save(plain, unpacked, {str(k): str(v) for k, v in facts.items()})
            return load_quantized(unpacked)
    except (KeyError, ValueError, TypeError, AttributeError, zlib.error, RecursionError, FileFormatError):
        raise FileFormatError(f"{path} holds a pruned and quantized model that does not fit together") from None
