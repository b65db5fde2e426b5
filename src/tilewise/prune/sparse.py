"""Layers that skip what is zero.

`SparseLinear` keeps only the non-zero weights, in the format of the compiled kernels, and multiplies with them. It
times itself against the dense product the first time it meets a batch of some size and uses whichever is faster;
`explain()` says which and why.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ShapeError
from tilewise.nn import BatchNorm2d, Conv2d, Linear, Module, Sequential
from tilewise.prune.bits import unpacked_array
from tilewise.prune.choice import SparseLayer, refuse_gradient
from tilewise.prune.conv import FoldedNorm, SparseConv2d, sparse_with_norm
from tilewise.prune.masks import checked_weights
from tilewise.tensor import Tensor, _wrap, is_grad_enabled, no_grad

Array = npt.NDArray[Any]
_MOST_SHAPES = 1000


class SparseLinear(SparseLayer):
    """y = x @ weight.T + bias with a sparse weight (out, in)."""

    called, format = "a sparse linear layer", "tilewise sparse linear 1"
    sizes = (1, 2, 4, 8, 16, 24, 32, 64)

    def __init__(self, weight: Array, bias: Array | None = None, always_sparse: bool = False) -> None:
        w = np.ascontiguousarray(checked_weights(weight), np.float32)
        if w.ndim != 2:
            raise ShapeError(f"a linear layer's weight has two dimensions, not {w.ndim}")
        if bias is not None and np.shape(bias) != (len(w),):
            raise ShapeError(f"the bias of {len(w)} outputs has the shape ({len(w)},), not {np.shape(bias)}")
        super().__init__(w, bias, always_sparse)
        self.out_features, self.in_features = w.shape
        self._kernel = (_NumpySparse if native is None else native.SparseWeights)(w, self.float_bias)
        # shapes of input met before: whether the dense product is used
        self._dense_for: dict[tuple[int, ...], bool] = {}

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

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        values = x.data if isinstance(x, Tensor) else x
        plain = residual is None and (activation is None or activation == "relu")
        dense = self._dense_for.get(getattr(values, "shape", ())) if plain else None
        if dense is not None and not (values is not x and x.requires_grad and is_grad_enabled()):
            known = self._known_dense if dense else self._kernel.multiply
            out = known(values, activation is not None)
            if out is not None:
                return _wrap(out)
        return self._any(x, activation, residual)

    def _any(self, x: Any, activation: str | None, residual: Any) -> Tensor:
        """What `forward` does the first time it meets a shape, and for all that is not the plain product."""
        refuse_gradient(x)
        values = np.asarray(x.data if isinstance(x, Tensor) else x, np.float32)
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"SparseLinear takes (..., {self.in_features}), not {values.shape}")
        rows = np.ascontiguousarray(values.reshape(-1, self.in_features))
        fused = residual is None and activation == "relu"
        dense = self._is_dense(rows)
        if len(self._dense_for) < _MOST_SHAPES:
            self._dense_for[values.shape] = dense
        product = self._dense_product(rows, fused) if dense else self._kernel.multiply(rows, fused)
        return self._finished(product.reshape(*values.shape[:-1], self.out_features), activation, residual, fused)

    # --- which product ---

    def _is_dense(self, rows: Array) -> bool:
        if self.always_sparse or not len(rows):
            return False
        return self._choose(
            self._size_of(len(rows)),
            lambda: self._kernel.multiply(rows, False),
            lambda: self._dense_product(rows, False),
            f"batch {len(rows)}",
        )

    def _dense_product(self, rows: Array, relu: bool) -> Array:
        if self._dense is None:
            self._dense = self._kernel.to_dense()
        activation = "relu" if relu else None
        product: Array = current_backend().dispatch(
            "matmul", rows, self._dense.T, bias=self.float_bias, activation=activation
        )
        return product

    def _known_dense(self, values: Array, relu: bool) -> Array | None:
        """The dense product of an array of a shape met before, or None where it must be converted first."""
        if values.dtype != np.float32:
            return None
        if values.ndim == 2:
            return self._dense_product(values, relu)
        out = self._dense_product(values.reshape(-1, self.in_features), relu)
        return out.reshape(*values.shape[:-1], self.out_features)

    def _weights(self) -> Array:
        weight: Array = self._kernel.to_dense()
        return weight

    @classmethod
    def _restored(cls, arrays: dict[str, Array]) -> Self:
        return cls(unpacked_array(arrays, np.float32), arrays.get("bias"))


class _NumpySparse:
    """The kernel's interface where it is not built: the zeros are stored and multiplied like the rest."""

    def __init__(self, dense: Array, bias: Array | None) -> None:
        self._dense, self._bias = dense.copy(), bias
        self.nbytes = self._dense.nbytes

    def multiply(self, x: Array, relu: bool) -> Any:
        if x.dtype != np.float32:
            return None
        out: Array = x @ self._dense.T
        out = out if self._bias is None else out + self._bias
        return np.maximum(out, 0) if relu else out

    def to_dense(self) -> Array:
        return self._dense.copy()


def sparsify(model: Module, at_least: float = 0.6, sample: Any = None) -> Module:
    """A copy of a pruned model whose linear and convolution layers of at least this sparsity are sparse ones.

    With `sample`, a batch of inputs, the copy is run on it once and layers whose dense product was faster stay as they
    were, so that they take no more memory than before. `sparse_report` of the copy says per layer what was decided.

    It is for inference: a batch norm in eval mode after a convolution goes into its weights. Convolutions with groups
    stay dense.
    """
    out = _converted(model, at_least, frozenset())
    report: dict[str, str] = {}
    if sample is not None:
        with no_grad():
            out(sample if isinstance(sample, Tensor) else Tensor(sample))
        chosen = {
            name: list(layer.explain().values())
            for name, layer in out.named_modules()
            if isinstance(layer, SparseLinear | SparseConv2d)
        }
        report = {name: whys[-1] for name, whys in chosen.items() if whys}
        out = _converted(model, at_least, frozenset(name for name, why in report.items() if why.startswith("dense")))
    object.__setattr__(out, "sparse_report", report)
    return out


def _converted(model: Module, at_least: float, kept: frozenset[str]) -> Module:
    out = copy.deepcopy(model)
    if _is_sparse(out, at_least):
        return out if "" in kept else _sparse_layer(out)
    _replace(out, at_least, kept, "")
    return out


def _is_sparse(layer: Module, at_least: float) -> bool:
    if (
        not isinstance(layer, Linear | Conv2d)
        or getattr(layer, "groups", 1) != 1
        or not getattr(layer, "is_even", True)
    ):
        return False
    weight = layer.weight.data
    return bool(weight.size and np.count_nonzero(weight) <= (1 - at_least) * weight.size)


def _sparse_layer(layer: Any) -> Module:
    return SparseLinear.from_dense(layer) if isinstance(layer, Linear) else SparseConv2d.from_dense(layer)


def _replace(module: Module, at_least: float, kept: frozenset[str], prefix: str) -> None:
    children = list(module.named_children())
    for i, (name, child) in enumerate(children):
        path = f"{prefix}{name}"
        if not _is_sparse(child, at_least) or path in kept:
            _replace(child, at_least, kept, f"{path}.")
            continue
        after_name, after = children[i + 1] if i + 1 < len(children) else ("", None)
        norm_follows = isinstance(module, Sequential) and isinstance(after, BatchNorm2d) and not after.training
        if isinstance(child, Conv2d) and isinstance(after, BatchNorm2d) and norm_follows:
            setattr(module, name, sparse_with_norm(child, after))
            setattr(module, after_name, FoldedNorm())
        else:
            setattr(module, name, _sparse_layer(child))
