"""Base class of the sparse layers: measured choice between sparse and dense kernels, epilogue, and files.

A kernel that skips zeros is not always faster; the break-even sparsity depends on the machine, the shape and the
pattern. So a layer times both kernels when it meets a new input size, uses the faster one, and can explain its choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._events import recorders, tracers
from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, FileFormatError, GradientError, ShapeError
from tilewise.io import load_arrays, save
from tilewise.nn import Module, ReLU
from tilewise.nn.layers import fusable_activation
from tilewise.nn.module import FusibleLayer
from tilewise.prune.bitmask import pack_sparse
from tilewise.tensor import Tensor, _wrap, is_grad_enabled

Array = npt.NDArray[Any]
_MAX_CACHED_SHAPES = 1000  # bounds the memory of `_dense_for`


@dataclass(frozen=True)
class KernelChoice:
    """Times of the sparse and the dense kernel in seconds for an input size, which `at` describes."""

    sparse_s: float
    dense_s: float
    at: str

    @property
    def dense(self) -> bool:
        """Whether the dense kernel is faster."""
        return self.dense_s < self.sparse_s

    def __str__(self) -> str:
        if np.isinf(self.sparse_s):
            return "dense: the sparse kernels are compiled ones, which are not installed"
        faster = "dense" if self.dense else "sparse"
        return f"{faster}: sparse {self.sparse_s * 1e6:.0f} µs, dense {self.dense_s * 1e6:.0f} µs at {self.at}"


def time_both(sparse: Callable[[], Any], dense: Callable[[], Any], at: str) -> KernelChoice:
    """Time both kernels interleaved, the fastest of 20 calls each; the dense one without compiled kernels."""
    from tilewise.profile.timing.clock import time_interleaved

    if native is None:  # NumPy multiplies the zeros too: a difference in time would be noise
        return KernelChoice(np.inf, 0.0, at)
    sparse_s, dense_s = (min(times) for times in time_interleaved((sparse, dense), 20))
    return KernelChoice(sparse_s, dense_s, at)


def reject_gradient(x: Any) -> None:
    """Raise GradientError if a gradient would be needed."""
    if isinstance(x, Tensor) and x.requires_grad and is_grad_enabled():
        raise GradientError("a sparse layer has no gradient; run it under no_grad()")


def check_layer_size(layer: str, *sizes: Any) -> None:
    """Raise ConfigurationError if a constructor received a weight or a layer instead of its sizes."""
    if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ConfigurationError(
            f"{layer}(...) takes the sizes of a new layer, as nn.{layer.removeprefix('Sparse')} does; use "
            f"{layer}.from_dense(layer) for a trained layer and {layer}.from_weights(weight, bias) for arrays"
        )


class SparseLayer(FusibleLayer):
    """Base class of layers with sparse weights; dense weights are kept as well where they are faster."""

    description: str  # for error messages
    format: str  # format name in its file
    size: int  # weights, zeros included
    sizes: tuple[int, ...]  # upper bounds of the batch-size classes that are timed separately
    _kernel: Any
    _dense: Any

    def _describe(self, weight: Array, bias: Array | None, always_sparse: bool) -> None:
        """Set the attributes common to sparse layers from a dense weight: sizes, bias, nonzeros."""
        self.float_bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self.nonzeros, self.size, self.always_sparse = int(np.count_nonzero(weight)), weight.size, always_sparse
        self._dense = None
        self._choices: dict[Any, KernelChoice] = {}

    def stay_sparse(self) -> None:
        """Always use the sparse kernel from now on, and free the dense weights."""
        self.always_sparse, self._dense = True, None
        self._choices.clear()

    @property
    def sparsity(self) -> float:
        return 1 - self.nonzeros / self.size if self.size else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias, including the dense weights if they are faster."""
        buffers = (self._kernel, self._dense, self.float_bias)
        return int(sum(buffer.nbytes for buffer in buffers if buffer is not None))

    def explain(self) -> dict[str, str]:
        """Return, for each input size so far, which kernel was chosen and both kernels' times."""
        names = [f"up to {n}" for n in self.sizes] + [f"above {self.sizes[-1]}"]
        return {names[size]: str(choice) for size, choice in sorted(self._choices.items())}

    def forward_fused(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        """Run this layer with the activation after it; return (result, number of layers run)."""
        activation = fusable_activation(layers[1:2])
        return self(x, activation=activation), 2 if activation else 1

    def _record(self, x: Tensor, activation: str | None, residual: Any) -> Tensor | None:
        """Compute by a traced dense operation while tracing, so that the plan chooses the kernel; None if it cannot."""
        return None

    def _size_class(self, batch: int) -> int:
        """Return the index of the batch-size range that shares one choice of kernel."""
        return int(np.searchsorted(self.sizes, batch))

    def _choose(self, key: Any, sparse: Callable[[], Any], dense: Callable[[], Any], at: str) -> bool:
        """Tell whether the dense kernel is faster at this size (`key`); both are timed at the first call."""
        if key not in self._choices:
            dense_before = self._dense
            self._choices[key] = time_both(sparse, dense, at)
            if not self._choices[key].dense:  # free the dense weights that were only created for timing
                self._dense = dense_before
        return self._choices[key].dense

    @staticmethod
    def _apply_epilogue(out: Array, activation: str | None, residual: Any, fused: bool) -> Tensor:
        """Add the residual and apply the activation, unless the kernel has done so (`fused`)."""
        if residual is not None:
            out += np.asarray(residual.data if isinstance(residual, Tensor) else residual)
        if activation is not None and not fused:
            out = current_backend().dispatch(activation, out)
        return Tensor(out)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the non-zero values and one bit per weight to a safetensors file."""
        bias = {} if self.float_bias is None else {"bias": self.float_bias}
        save(pack_sparse(self.weights()) | self._extra_arrays() | bias, path, {"format": self.format})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a layer written by `save`."""
        arrays, metadata = load_arrays(path)
        try:
            floats = [arrays[name] for name in ("bias", "scale") if name in arrays]
            if metadata.get("format") != cls.format or any(array.dtype != np.float32 for array in floats):
                raise ValueError
            return cls._from_arrays(arrays)
        except (KeyError, ValueError, TypeError):
            raise FileFormatError(f"{path} does not contain {cls.description}") from None

    def weights(self) -> Array:
        """Return the dense weights, zeros included."""
        weight: Array = self._kernel.to_dense()
        return weight

    def _extra_arrays(self) -> dict[str, Array]:
        """Return the arrays to store besides weights and bias."""
        return {}

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Create the layer from the arrays of its file."""
        raise NotImplementedError


class SparseMatrixLayer(SparseLayer):
    """Base class of sparse linear layers over the last axis."""

    in_features: int
    out_features: int

    def _describe(self, weight: Array, bias: Array | None, always_sparse: bool) -> None:
        """Set the layer's attributes from its weight (out, in) and bias."""
        super()._describe(weight, bias, always_sparse)
        self.out_features, self.in_features = weight.shape
        self._dense_for: dict[tuple[int, ...], bool] = {}  # input shape -> True if the dense product is used

    def stay_sparse(self) -> None:
        """Always use the sparse kernel from now on, and discard earlier choices."""
        super().stay_sparse()
        self._dense_for.clear()

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        """Compute activation(x @ weight.T + bias + residual); shapes seen before skip all checks."""
        if tracers and isinstance(x, Tensor) and (recorded := self._record(x, activation, residual)) is not None:
            return recorded
        values = x.data if isinstance(x, Tensor) else x
        fusable = residual is None and (activation is None or activation == "relu")
        dense = self._dense_for.get(getattr(values, "shape", ())) if fusable else None
        if dense is not None and not (values is not x and x.requires_grad and is_grad_enabled()):
            multiply = self._dense_fast if dense else self._kernel.multiply
            out = multiply(values, activation is not None)
            if out is not None:
                return _wrap(out)
        return self._forward_general(x, activation, residual)

    def forward_fused(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        """Run this layer and the sparse layers and ReLUs after it on plain arrays.

        Return (result, number of layers run).

        The products of a small network take a few microseconds each, about as long as the calls around them.
        """
        if recorders or (x.requires_grad and is_grad_enabled()):
            return super().forward_fused(x, layers)
        values, count = x.data, 0
        while count < len(layers) and isinstance(layers[count], SparseMatrixLayer):
            layer: Any = layers[count]
            dense = layer._dense_for.get(values.shape)
            if dense is None:
                break
            relu = count + 1 < len(layers) and layers[count + 1].__class__ is ReLU
            out = (layer._dense_fast if dense else layer._kernel.multiply)(values, relu)
            if out is None:
                break
            values, count = out, count + 1 + relu
        return (_wrap(values), count) if count else super().forward_fused(x, layers)

    def _forward_general(self, x: Any, activation: str | None, residual: Any) -> Tensor:
        """Compute the layer for a new shape, or with an epilogue that the kernel does not fuse."""
        reject_gradient(x)
        values = np.asarray(x.data if isinstance(x, Tensor) else x, np.float32)
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"{type(self).__name__} needs inputs (..., {self.in_features}), not {values.shape}")
        rows = np.ascontiguousarray(values.reshape(-1, self.in_features))
        fused = residual is None and activation == "relu"
        dense = self._is_dense(rows)
        if len(self._dense_for) < _MAX_CACHED_SHAPES:
            self._dense_for[values.shape] = dense
        product = self._dense_product(rows, fused) if dense else self._kernel.multiply(rows, fused)
        product = product.reshape(*values.shape[:-1], self.out_features)
        return self._apply_epilogue(product, activation, residual, fused)

    def _is_dense(self, rows: Array) -> bool:
        """Tell whether the dense kernel is the faster one for as many rows as `rows` has."""
        if self.always_sparse or not len(rows):
            return False
        return self._choose(
            self._size_class(len(rows)),
            lambda: self._kernel.multiply(rows, False),
            lambda: self._dense_product(rows, False),
            f"batch {len(rows)}",
        )

    def _dense_product(self, rows: Array, relu: bool) -> Array:
        """Multiply rows by the dense weights, which are unpacked at the first use."""
        raise NotImplementedError

    def _dense_fast(self, values: Array, relu: bool) -> Array | None:
        """Multiply by the dense weights without checks; None if the dtype has to be converted first."""
        if values.dtype != np.float32:
            return None
        if values.ndim == 2:
            return self._dense_product(values, relu)
        out = self._dense_product(values.reshape(-1, self.in_features), relu)
        return out.reshape(*values.shape[:-1], self.out_features)
