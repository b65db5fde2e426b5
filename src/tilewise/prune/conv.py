"""`SparseConv2d`: a convolution that stores and multiplies only its non-zero weights.

The weights are those of a linear layer over patches (channel, filter row, filter column). The dense convolution of 3×3
filters uses Winograd's algorithm and needs less than half the multiplications, so a plan compares the costs of both.
Outside of a plan, the layer times both for each image size, and `explain()` says which one it uses and why.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._events import tracers
from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, ShapeError, type_name
from tilewise.nn import BatchNorm2d, Conv2d, Module
from tilewise.nn import functional as F
from tilewise.nn.layers import Rng, fold_batch_norm, fusable_activation
from tilewise.prune.bitmask import unpack_sparse
from tilewise.prune.masks import MagnitudePruner, checked_weights
from tilewise.prune.sparse_layer import SparseLayer, check_layer_size, reject_gradient
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_MAX_PADDING = 1024  # limit for strides and paddings in a file, because padding an image takes memory


class SparseConv2d(SparseLayer):
    """A convolution over (N, C, H, W) with a sparse weight (out, in, kh, kw)."""

    description, format = "a sparse convolution", "tilewise sparse convolution 1"
    sizes = (1, 4, 16, 64)

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 0,
        kernel_size: int | Pair = 3,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        *,
        bias: bool = True,
        sparsity: float = 0.7,
        rng: Rng = None,
    ) -> None:
        """Draw weights as nn.Conv2d does and prune them to `sparsity`; `from_dense` converts a trained layer."""
        check_layer_size("SparseConv2d", in_channels, out_channels)
        conv = Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=bias, rng=rng)
        weight = MagnitudePruner().prune(conv.weight.data, sparsity)
        settings = conv.stride, (conv.padding[0], conv.padding[1])
        self._pack(weight, None if conv.bias is None else conv.bias.data, *settings, always_sparse=False)

    @classmethod
    def from_weights(
        cls,
        weight: Array,
        bias: Array | None = None,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        always_sparse: bool = False,
    ) -> Self:
        """Create a layer from a weight (out, in, kh, kw). `always_sparse` uses the sparse kernel even if slower."""
        layer = cls.__new__(cls)
        layer._pack(weight, bias, stride, padding, always_sparse)
        return layer

    def _pack(self, weight: Array, bias: Array | None, stride: Pair, padding: Pair, always_sparse: bool) -> None:
        """Check the shapes and set up the layer from a dense weight (out, in, kh, kw)."""
        w = np.ascontiguousarray(checked_weights(weight), np.float32)
        if w.ndim != 4:
            raise ShapeError(f"the weight of a convolution must have four dimensions, not {w.ndim}")
        if bias is not None and np.shape(bias) != (len(w),):
            raise ShapeError(f"the bias of {len(w)} filters must have the shape ({len(w)},), not {np.shape(bias)}")
        if min(stride) < 1 or min(padding) < 0:
            raise ShapeError(f"stride {stride} must be at least 1 and padding {padding} at least 0")
        self._describe(w, bias, always_sparse)
        self.out_channels, self.in_channels, *filter_size = w.shape
        self.kernel_size: Pair = (filter_size[0], filter_size[1])
        self.stride, self.padding = (stride[0], stride[1]), (padding[0], padding[1])
        self._kernel = None if native is None else native.SparseWeights(w.reshape(len(w), -1), self.float_bias)
        self._dense = w.copy() if native is None else None

    @classmethod
    def from_dense(cls, conv: Conv2d, always_sparse: bool = False) -> SparseConv2d:
        """Convert a pruned nn.Conv2d to sparse form; `always_sparse` uses the sparse kernel even where slower."""
        if not isinstance(conv, Conv2d):
            raise ConfigurationError(f"SparseConv2d.from_dense takes an nn.Conv2d, not a {type_name(conv)}")
        if conv.groups != 1:
            raise ConfigurationError("a convolution with groups has no sparse kernel; it stays dense")
        if not conv.is_even:
            raise ConfigurationError(
                "a convolution with dilation or uneven padding has no sparse kernel; it stays dense"
            )
        bias = None if conv.bias is None else conv.bias.data
        return cls.from_weights(conv.weight.data, bias, conv.stride, (conv.padding[0], conv.padding[1]), always_sparse)

    from_float = from_dense

    def to_dense(self) -> Conv2d:
        """Convert to nn.Conv2d."""
        has_bias = self.float_bias is not None
        conv = Conv2d(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, bias=has_bias, rng=0
        )
        conv.weight.data[...] = self.weights()
        if conv.bias is not None and self.float_bias is not None:
            conv.bias.data[...] = self.float_bias
        return conv

    def explain(self) -> dict[str, str]:
        """Return, for each input size so far, which kernel was chosen and both kernels' times."""
        return {choice.at: str(choice) for choice in self._choices.values()}

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        """Convolve images (N, C, H, W); then add the residual and apply the activation, if any."""
        if tracers and isinstance(x, Tensor):  # the plan chooses the kernel
            bias = None if self.float_bias is None else Tensor(self.float_bias)
            geometry: dict[str, Any] = {"stride": self.stride, "padding": self.padding}
            weight = Tensor(self.weights())
            return F.conv2d(x, weight, bias, **geometry, activation=activation, residual=residual)
        reject_gradient(x)
        values = np.ascontiguousarray(x.data if isinstance(x, Tensor) else x, np.float32)
        self._check(values.shape)
        fused = activation == "relu" and residual is None
        return self._apply_epilogue(self._convolve(values, fused), activation, residual, fused)

    def forward_fused(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        """Run this layer with the norm and activation after it; return (result, number of layers run)."""
        count = 2 if len(layers) > 1 and isinstance(layers[1], FoldedNorm) else 1
        activation = fusable_activation(layers[count : count + 1])
        return self(x, activation=activation), count + (activation is not None)

    def _check(self, shape: tuple[int, ...]) -> None:
        """Raise `ShapeError` unless the input is (N, in_channels, H, W) and the filter fits into it."""
        if len(shape) != 4 or shape[1] != self.in_channels:
            raise ShapeError(f"SparseConv2d needs inputs (N, {self.in_channels}, H, W), not {shape}")
        if shape[2] + 2 * self.padding[0] < self.kernel_size[0] or shape[3] + 2 * self.padding[1] < self.kernel_size[1]:
            raise ShapeError(f"a filter of {self.kernel_size} does not fit images of {shape[2:]}")

    # --- sparse or dense ---

    def _convolve(self, x: Array, relu: bool) -> Array:
        """Convolve with the faster kernel for this input size."""
        if self._kernel is None:
            return self._dense_product(x, relu)
        if self.always_sparse or not x.size:
            return self._sparse_product(x, relu)
        sparse, dense = (partial(product, x) for product in (self._sparse_product, self._dense_product))
        key = (self._size_class(len(x)), x.shape[2], x.shape[3])
        convolve = dense if self._choose(key, sparse, dense, f"input {x.shape}") else sparse
        return convolve(relu)

    def _sparse_product(self, x: Array, relu: bool = False) -> Array:
        """Convolve with the sparse kernel, which skips zero weights."""
        kernel: Any = self._kernel
        channels_last: Array = kernel.convolve(x, *self.kernel_size, *self.stride, *self.padding, relu)
        return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))

    def weights(self) -> Array:
        """Return the weights as a dense array (F, C, kh, kw)."""
        if self._dense is not None:
            dense: Array = self._dense
            return dense
        kernel: Any = self._kernel
        weight: Array = kernel.to_dense().reshape(self.out_channels, self.in_channels, *self.kernel_size)
        return weight

    def _dense_product(self, x: Array, relu: bool = False) -> Array:
        """Convolve by the dense kernel, whose weights are unpacked once."""
        if self._dense is None:
            self._dense = self.weights()
        options = {"stride": self.stride, "padding": self.padding, "activation": "relu" if relu else None}
        out: Array = current_backend().dispatch("conv2d", x, self._dense, self.float_bias, **options)
        return out

    def _extra_arrays(self) -> dict[str, Array]:
        return {"geometry": np.array([*self.stride, *self.padding], np.int64)}

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Create the layer from the arrays of a file; `ValueError` for invalid stride or padding."""
        sy, sx, py, px = (int(n) for n in arrays["geometry"])
        if max(sy, sx, py, px) > _MAX_PADDING:
            raise ValueError
        return cls.from_weights(unpack_sparse(arrays, np.float32), arrays.get("bias"), (sy, sx), (py, px))


class FoldedNorm(Module):
    """Identity in place of a batch norm that was folded into the sparse convolution before it."""

    def forward(self, x: Any) -> Any:
        return x


def sparse_with_norm(conv: Conv2d, norm: BatchNorm2d) -> SparseConv2d:
    """Fold an eval-mode batch norm into the convolution before it and return that as a sparse layer."""
    weight, bias = fold_batch_norm(conv, norm)
    return SparseConv2d.from_weights(weight.data, bias.data, conv.stride, (conv.padding[0], conv.padding[1]))
