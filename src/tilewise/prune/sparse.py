"""Sparse linear layers, and the conversion of pruned models to sparse layers.

`SparseLinear` stores only the non-zero weights, in the format of the compiled kernels. A plan chooses the kernel of
each layer by its cost. Outside of a plan, the layer times its kernel against the dense product once for each batch size
and uses the faster one; `explain()` says which one and why.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, ShapeError, TilewiseError, type_name
from tilewise.graph.plan import compile
from tilewise.nn import BatchNorm2d, Conv2d, Linear, Module, MultiHeadAttention, Sequential
from tilewise.nn import functional as F
from tilewise.nn.layers import Rng
from tilewise.prune.bitmask import unpack_sparse
from tilewise.prune.conv import FoldedNorm, SparseConv2d, sparse_with_norm
from tilewise.prune.masks import MagnitudePruner, checked_weights
from tilewise.prune.sparse_layer import SparseMatrixLayer, check_layer_size
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]


class SparseLinear(SparseMatrixLayer, metaclass=ExplainsMethods):
    """Linear layer with a sparse weight (out, in): y = x @ weight.T + bias."""

    description, format = "a sparse linear layer", "tilewise sparse linear 1"
    sizes = (1, 2, 4, 8, 16, 24, 32, 64)

    def __init__(
        self, in_features: int, out_features: int = 0, bias: bool = True, *, sparsity: float = 0.7, rng: Rng = None
    ) -> None:
        """Draw weights as nn.Linear does and prune them to `sparsity`; `from_dense` converts a trained layer."""
        check_layer_size("SparseLinear", in_features, out_features)
        linear = Linear(in_features, out_features, bias, rng)
        weight = MagnitudePruner().prune(linear.weight.data, sparsity)
        self._pack(weight, None if linear.bias is None else linear.bias.data, always_sparse=False)

    @classmethod
    def from_weights(cls, weight: Array, bias: Array | None = None, always_sparse: bool = False) -> Self:
        """Create a layer from a weight (out, in). `always_sparse` uses the sparse kernel even if it is slower."""
        layer = cls.__new__(cls)
        layer._pack(weight, bias, always_sparse)
        return layer

    def _pack(self, weight: Array, bias: Array | None, always_sparse: bool) -> None:
        """Check the shapes and set up the layer from a dense weight (out, in)."""
        w = np.ascontiguousarray(checked_weights(weight), np.float32)
        if w.ndim != 2:
            raise ShapeError(f"the weight of a linear layer must have two dimensions, not {w.ndim}")
        if bias is not None and np.shape(bias) != (len(w),):
            raise ShapeError(f"the bias of {len(w)} outputs must have the shape ({len(w)},), not {np.shape(bias)}")
        self._describe(w, bias, always_sparse)
        self._kernel = (_NumpySparse if native is None else native.SparseWeights)(w, self.float_bias)

    @classmethod
    def from_dense(cls, linear: Linear, always_sparse: bool = False) -> SparseLinear:
        """Convert a pruned nn.Linear. `always_sparse` uses the sparse kernel even if it is slower."""
        if not isinstance(linear, Linear):
            raise ConfigurationError(f"SparseLinear.from_dense takes an nn.Linear, not a {type_name(linear)}")
        if not isinstance(always_sparse, bool):
            raise ConfigurationError(
                "SparseLinear.from_dense keeps the zeros that are there; use MagnitudePruner first"
            )
        bias = None if linear.bias is None else linear.bias.data
        return cls.from_weights(linear.weight.data, bias, always_sparse)

    from_float = from_dense

    @classmethod
    def from_csr(cls, matrix: Any, bias: Array | None = None) -> SparseLinear:
        """Convert a SciPy sparse matrix (out, in)."""
        return cls.from_weights(matrix.toarray().astype(np.float32), bias)

    def to_dense(self) -> Linear:
        """Convert to nn.Linear."""
        layer = Linear(self.in_features, self.out_features, bias=self.float_bias is not None, rng=0)
        layer.weight.data[...] = self._kernel.to_dense()
        if layer.bias is not None and self.float_bias is not None:
            layer.bias.data[...] = self.float_bias
        return layer

    def to_csr(self) -> Any:
        """Convert to a SciPy CSR matrix (out, in); needs SciPy."""
        from scipy.sparse import csr_matrix

        return csr_matrix(self._kernel.to_dense())

    def _record(self, x: Tensor, activation: str | None, residual: Any) -> Tensor:
        bias = None if self.float_bias is None else Tensor(self.float_bias)
        return F.linear(x, Tensor(self.weights()), bias, activation=activation, residual=residual)

    def _dense_product(self, rows: Array, relu: bool) -> Array:
        """Multiply rows by the dense weights, which are unpacked at the first use."""
        if self._dense is None:
            self._dense = self._kernel.to_dense()
        activation = "relu" if relu else None
        product: Array = current_backend().dispatch(
            "matmul", rows, self._dense.T, bias=self.float_bias, activation=activation
        )
        return product

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Array]) -> Self:
        return cls.from_weights(unpack_sparse(arrays, np.float32), arrays.get("bias"))


class _NumpySparse:
    """NumPy version of the sparse kernel: a dense product, zeros included."""

    def __init__(self, dense: Array, bias: Array | None) -> None:
        self._dense, self._bias = dense.copy(), bias
        self.nbytes = self._dense.nbytes

    def multiply(self, x: Array, relu: bool) -> Any:
        """Compute x @ weight.T + bias, then ReLU if `relu`; None unless x is float32."""
        if x.dtype != np.float32:
            return None
        out: Array = x @ self._dense.T
        out = out if self._bias is None else out + self._bias
        return np.maximum(out, 0) if relu else out

    def to_dense(self) -> Array:
        return self._dense.copy()


class SparseAttention(MultiHeadAttention):
    """Multi-head attention whose projections may be sparse layers."""

    def __init__(self, attention: MultiHeadAttention, in_proj: Module, out_proj: Module) -> None:
        self.embed_dim, self.num_heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.causal = attention.causal
        self.in_proj, self.out_proj = in_proj, out_proj  # type: ignore[assignment]

    def project(self, x: Tensor) -> Tensor:
        packed: Tensor = self.in_proj(x)
        return packed

    def in_layer(self) -> Module:
        return self.in_proj


def sparsify(model: Module, at_least: float = 0.6, sample: Any = None) -> Module:
    """Copy a pruned model and convert its linear and convolution layers with at least this sparsity to sparse layers.

    A plan of the copy takes the sparse kernel of each layer where it costs less than the dense one; so does a plan of
    the pruned model itself. The copy stores no zeros. With `sample`, a batch of inputs, the copy is planned once:
    layers whose dense kernel costs less become dense layers, and the copy's attribute `sparse_report` says so. A GPT
    with sparse layers generates text with sparse matrix-vector products; plan it for a sample of one token, [[0]].

    The copy is for inference: a batch norm in eval mode after a convolution is folded into its weights. Convolutions
    with groups stay dense.
    """
    out = copy.deepcopy(model)
    if _is_sparse(out, at_least):
        out = _sparse_layer(out)
    else:
        _replace_sparse_layers(out, at_least)
    report: dict[str, str] = {}
    if sample is not None:
        x = np.asarray(sample.data if isinstance(sample, Tensor) else sample)
        layers = {name: m for name, m in out.named_modules() if isinstance(m, SparseLinear | SparseConv2d)}
        for name, text in _kernel_choices(out, layers, x).items():
            report[name] = text
            if text.startswith("dense"):
                out = _with_layer(out, name, layers[name].to_dense().eval())
            elif text.endswith("are multiplied"):  # a plan chose, so the layer need not time its kernels
                layers[name].stay_sparse()
    object.__setattr__(out, "sparse_report", report)
    return out


def _kernel_choices(model: Module, layers: dict[str, Any], x: Array) -> dict[str, str]:
    """Describe the kernel that each sparse layer uses for the input x: the plan's, or else the faster one."""
    try:
        planned = set(compile(model, x).algorithms)
    except TilewiseError:  # the model has no plan
        with no_grad():
            model(Tensor(x) if x.dtype.kind == "f" else x)
        explained = {name: list(layer.explain().values())[-1:] for name, layer in layers.items()}
        return {name: texts[0] for name, texts in explained.items() if texts}
    counts = {name: f"{layer.nonzeros:,} of {layer.size:,} weights" for name, layer in layers.items()}
    return {
        name: f"sparse: {counts[name]} are multiplied"
        if (name, "sparse") in planned
        else f"dense: its sparse kernel would cost more with {counts[name]}"
        for name in layers
    }


def _with_layer(model: Module, name: str, layer: Module) -> Module:
    """Replace the submodule called `name`, or the model itself if it is "", and return the model."""
    parent, _, child = name.rpartition(".")
    if not child:
        return layer
    setattr(dict(model.named_modules())[parent], child, layer)
    return model


def _is_sparse(layer: Module, at_least: float) -> bool:
    """Tell whether a layer can be sparse and at least this fraction of its weights is zero."""
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


def _sparse_attention(attention: MultiHeadAttention, at_least: float) -> MultiHeadAttention:
    """Make the projections of attention sparse; the attention is returned unchanged if both stay dense."""
    layers = {"in_proj": attention.in_layer(), "out_proj": attention.out_proj}
    sparse = {name: _sparse_layer(layer) for name, layer in layers.items() if _is_sparse(layer, at_least)}
    return SparseAttention(attention, **(layers | sparse)) if sparse else attention


def _replace_sparse_layers(module: Module, at_least: float) -> None:
    """Replace submodules with at least this share of zeros by sparse layers, in place, recursively."""
    children = list(module.named_children())
    for i, (name, child) in enumerate(children):
        if isinstance(child, MultiHeadAttention) and hasattr(child, "in_proj_weight"):
            setattr(module, name, _sparse_attention(child, at_least))
            continue
        if not _is_sparse(child, at_least):
            _replace_sparse_layers(child, at_least)
            continue
        # In a Sequential, the next child runs after this one, so a batch norm there can be folded.
        next_name, next_layer = children[i + 1] if i + 1 < len(children) else ("", None)
        in_order = isinstance(module, Sequential)
        if in_order and isinstance(child, Conv2d) and isinstance(next_layer, BatchNorm2d) and not next_layer.training:
            setattr(module, name, sparse_with_norm(child, next_layer))
            setattr(module, next_name, FoldedNorm())
        else:
            setattr(module, name, _sparse_layer(child))
