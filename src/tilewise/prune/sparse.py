"""Layers that skip what is zero.

`SparseLinear` keeps only the non-zero weights, in the format of the compiled kernels, and multiplies with them. It
times itself against the dense product the first time it meets a batch of some size and uses whichever is faster;
`explain()` says which and why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import FileFormatError, GradientError, ShapeError
from tilewise.io import load_arrays, save
from tilewise.nn import Linear, Module
from tilewise.prune.masks import checked_weights
from tilewise.tensor import Tensor, _wrap, is_grad_enabled

Array = npt.NDArray[Any]
_SIZES = (1, 4, 15, 32, 64)  # batches up to each of these, and larger ones, are timed apart
_MOST_SHAPES = 1000
_FORMAT = "tilewise sparse linear 1"


class SparseLinear(Module):
    """y = x @ weight.T + bias with a sparse weight (out, in)."""

    def __init__(self, weight: Array, bias: Array | None = None, always_sparse: bool = False) -> None:
        w = np.ascontiguousarray(checked_weights(weight), np.float32)
        if w.ndim != 2:
            raise ShapeError(f"a linear layer's weight has two dimensions, not {w.ndim}")
        self.out_features, self.in_features = w.shape
        self.nonzeros, self.always_sparse = int(np.count_nonzero(w)), always_sparse
        self.float_bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self._kernel = (_NumpySparse if native is None else native.SparseWeights)(w, self.float_bias)
        self._dense: Array | None = None
        self._choices: dict[int, str] = {}
        self._sparse_shapes: set[tuple[int, ...]] = set()  # shapes of input for which the sparse product is chosen

    @classmethod
    def from_dense(cls, linear: Linear, always_sparse: bool = False) -> SparseLinear:
        """From a pruned nn.Linear. `always_sparse` takes the sparse kernel without asking whether it pays."""
        return cls(linear.weight.data, None if linear.bias is None else linear.bias.data, always_sparse)

    @classmethod
    def from_csr(cls, matrix: Any, bias: Array | None = None) -> SparseLinear:
        """From a SciPy sparse matrix (out, in)."""
        return cls(matrix.toarray().astype(np.float32), bias)

    def to_dense(self) -> Linear:
        layer = Linear(self.in_features, self.out_features, bias=self.float_bias is not None, rng=0)
        layer.weight.data[...] = self._kernel.to_dense()
        if layer.bias is not None and self.float_bias is not None:
            layer.bias.data[...] = self.float_bias
        return layer

    def to_csr(self) -> Any:
        """A SciPy CSR matrix (out, in); needs SciPy."""
        from scipy.sparse import csr_matrix

        return csr_matrix(self._kernel.to_dense())

    @property
    def sparsity(self) -> float:
        size = self.in_features * self.out_features
        return 1 - self.nonzeros / size if size else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes the weights and bias take; a dense copy kept because it is faster counts too."""
        held = [self._kernel.nbytes, 0 if self._dense is None else self._dense.nbytes]
        return int(sum(held) + (0 if self.float_bias is None else self.float_bias.nbytes))

    def explain(self) -> dict[str, str]:
        """For each size of batch met so far: "sparse" or "dense", and the times that decided it."""
        names = [f"up to {n}" for n in _SIZES] + [f"above {_SIZES[-1]}"]
        return {names[size]: why for size, why in sorted(self._choices.items())}

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        values = x.data if isinstance(x, Tensor) else x
        if residual is None and activation is None and getattr(values, "shape", None) in self._sparse_shapes:
            out = self._kernel.multiply(values, False)
            if out is not None and not (values is not x and x.requires_grad and is_grad_enabled()):
                return _wrap(out)
        return self._any(x, activation, residual)

    def _any(self, x: Any, activation: str | None, residual: Any) -> Tensor:
        """What `forward` does the first time it meets a shape, and for all that is not the plain product."""
        if is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise GradientError("a sparse layer has no gradient; run it under no_grad()")
        values = np.asarray(x.data if isinstance(x, Tensor) else x, np.float32)
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"SparseLinear takes (..., {self.in_features}), not {values.shape}")
        rows = np.ascontiguousarray(values.reshape(-1, self.in_features))
        plain = residual is None and activation in (None, "relu")
        out = self._product(rows, plain and activation == "relu").reshape(*values.shape[:-1], self.out_features)
        if residual is not None:
            out += np.asarray(residual.data if isinstance(residual, Tensor) else residual)
        if activation is not None and not (plain and activation == "relu"):
            out = current_backend().dispatch(activation, out)
        if not self._is_dense(len(rows)) and len(self._sparse_shapes) < _MOST_SHAPES:
            self._sparse_shapes.add(values.shape)
        return Tensor(out)

    # --- which product ---

    def _product(self, rows: Array, relu: bool) -> Array:
        size = int(np.searchsorted(_SIZES, len(rows)))
        if not self.always_sparse and size not in self._choices and len(rows):
            self._measure(rows, size)
        if self._is_dense(len(rows)):
            return self._dense_product(rows, relu)
        product: Array = self._kernel.multiply(rows, relu)
        return product

    def _is_dense(self, batch: int) -> bool:
        return self._choices.get(int(np.searchsorted(_SIZES, batch)), "sparse").startswith("dense")

    def _dense_product(self, rows: Array, relu: bool) -> Array:
        if self._dense is None:
            self._dense = self._kernel.to_dense()
        activation = "relu" if relu else None
        product: Array = current_backend().dispatch(
            "matmul", rows, self._dense.T, bias=self.float_bias, activation=activation
        )
        return product

    def _measure(self, rows: Array, size: int) -> None:
        kept = self._dense
        sparse = quickest(lambda: self._kernel.multiply(rows, False))
        dense = quickest(lambda: self._dense_product(rows, False))
        choice = "sparse" if sparse <= dense else "dense"
        if choice == "sparse":
            self._dense = kept
        self._choices[size] = f"{choice}: sparse {sparse * 1e6:.0f} µs, dense {dense * 1e6:.0f} µs at batch {len(rows)}"

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Non-zero values and one bit per weight, as safetensors."""
        dense = self._kernel.to_dense()
        arrays = {
            "shape": np.array(dense.shape, np.int64),
            "mask": np.packbits(dense != 0),
            "values": dense[dense != 0],
        }
        if self.float_bias is not None:
            arrays["bias"] = self.float_bias
        save(arrays, path, {"format": _FORMAT})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SparseLinear:
        arrays, metadata = load_arrays(path)
        try:
            outputs, inputs = (int(n) for n in arrays["shape"])
            bits, values, bias = arrays["mask"], arrays["values"], arrays.get("bias")
            fits = outputs >= 0 and inputs >= 0 and bits.shape == (-(-outputs * inputs // 8),) and values.ndim == 1
            if metadata.get("format") != _FORMAT or not fits or (bias is not None and bias.shape != (outputs,)):
                raise ValueError
            mask = np.unpackbits(bits, count=outputs * inputs).astype(bool)
            if mask.sum() != values.size:
                raise ValueError
            dense = np.zeros(outputs * inputs, np.float32)
            dense[mask] = values
        except (KeyError, ValueError, TypeError):
            raise FileFormatError(f"{path} does not hold a sparse linear layer") from None
        return cls(dense.reshape(outputs, inputs), bias)


class _NumpySparse:
    """The kernel's interface where it is not built: the zeros are stored and multiplied like the rest."""

    def __init__(self, dense: Array, bias: Array | None) -> None:
        self._dense, self._bias = dense.copy(), bias
        self.nbytes = self._dense.nbytes

    def multiply(self, x: Array, relu: bool) -> Array:
        out: Array = x @ self._dense.T
        out = out if self._bias is None else out + self._bias
        return np.maximum(out, 0) if relu else out

    def to_dense(self) -> Array:
        return self._dense.copy()


def quickest(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def sparsify(model: Module, at_least: float = 0.6) -> Module:
    """A copy of a pruned model whose linear layers of at least this sparsity are SparseLinear."""
    import copy

    out = copy.deepcopy(model)
    _replace(out, at_least)
    return out


def _replace(module: Module, at_least: float) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, Linear) and np.count_nonzero(child.weight.data) <= (1 - at_least) * child.weight.data.size:
            setattr(module, name, SparseLinear.from_dense(child))
        else:
            _replace(child, at_least)
