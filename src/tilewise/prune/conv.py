"""`SparseConv2d`: a convolution that keeps and multiplies only its non-zero weights.

The weights are those of a linear layer over patches (channel, kernel row, kernel column); the compiled kernel gathers
a tile of patches at a time and takes it for a batch. Beside it stands the dense convolution, which for 3×3 filters is
Winograd's and needs less than half the multiplications: the layer times both for each size of image it meets, and
`explain()` says which one it uses and why.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn import BatchNorm2d, Conv2d, Module
from tilewise.nn.layers import folded, fusable_activation
from tilewise.prune.bits import unpacked_array
from tilewise.prune.choice import SparseLayer, refuse_gradient
from tilewise.prune.masks import checked_weights
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_WIDEST = 1024  # strides and paddings that a file may ask for: zeros around an image cost memory too


class SparseConv2d(SparseLayer):
    """A convolution over (N, C, H, W) with a sparse weight (out, in, kh, kw)."""

    called, format = "a sparse convolution", "tilewise sparse convolution 1"
    sizes = (1, 4, 16, 64)

    def __init__(
        self,
        weight: Array,
        bias: Array | None = None,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        always_sparse: bool = False,
    ) -> None:
        w = np.ascontiguousarray(checked_weights(weight), np.float32)
        if w.ndim != 4:
            raise ShapeError(f"a convolution's weight has four dimensions, not {w.ndim}")
        if bias is not None and np.shape(bias) != (len(w),):
            raise ShapeError(f"the bias of {len(w)} filters has the shape ({len(w)},), not {np.shape(bias)}")
        if min(stride) < 1 or min(padding) < 0:
            raise ShapeError(f"stride {stride} must be at least 1 and padding {padding} at least 0")
        super().__init__(w, bias, always_sparse)
        self.out_channels, self.in_channels, *kernel = w.shape
        self.kernel_size: Pair = (kernel[0], kernel[1])
        self.stride, self.padding = (stride[0], stride[1]), (padding[0], padding[1])
        self._kernel = None if native is None else native.SparseWeights(w.reshape(len(w), -1), self.float_bias)
        self._dense = w.copy() if native is None else None

    @classmethod
    def from_dense(cls, conv: Conv2d, always_sparse: bool = False) -> SparseConv2d:
        """From a pruned nn.Conv2d. `always_sparse` takes the sparse kernel without asking whether it pays."""
        if conv.groups != 1:
            raise ConfigurationError("a convolution with groups has no sparse kernel; it stays dense")
        if not conv.is_even:
            raise ConfigurationError(
                "a convolution with dilation or uneven padding has no sparse kernel; it stays dense"
            )
        bias = None if conv.bias is None else conv.bias.data
        return cls(conv.weight.data, bias, conv.stride, (conv.padding[0], conv.padding[1]), always_sparse)

    def to_dense(self) -> Conv2d:
        has_bias = self.float_bias is not None
        conv = Conv2d(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, bias=has_bias, rng=0
        )
        conv.weight.data[...] = self._weights()
        if conv.bias is not None and self.float_bias is not None:
            conv.bias.data[...] = self.float_bias
        return conv

    def explain(self) -> dict[str, str]:
        """For each size of input met so far: "sparse" or "dense", and the times that decided it."""
        return {choice.at: str(choice) for choice in self._choices.values()}

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        refuse_gradient(x)
        values = np.ascontiguousarray(x.data if isinstance(x, Tensor) else x, np.float32)
        self._check(values.shape)
        fused = activation == "relu" and residual is None
        return self._finished(self._convolve(values, fused), activation, residual, fused)

    def forward_with(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        used = 2 if len(layers) > 1 and isinstance(layers[1], FoldedNorm) else 1
        activation = fusable_activation(layers[used : used + 1])
        return self(x, activation=activation), used + (activation is not None)

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 4 or shape[1] != self.in_channels:
            raise ShapeError(f"SparseConv2d takes (N, {self.in_channels}, H, W), not {shape}")
        if shape[2] + 2 * self.padding[0] < self.kernel_size[0] or shape[3] + 2 * self.padding[1] < self.kernel_size[1]:
            raise ShapeError(f"a filter of {self.kernel_size} does not fit images of {shape[2:]}")

    # --- which product ---

    def _convolve(self, x: Array, relu: bool) -> Array:
        if self._kernel is None:
            return self._dense_product(x, relu)
        if self.always_sparse or not x.size:
            return self._sparse_product(x, relu)
        sparse, dense = (partial(product, x) for product in (self._sparse_product, self._dense_product))
        key = (self._size_of(len(x)), x.shape[2], x.shape[3])
        chosen = dense if self._choose(key, sparse, dense, f"input {x.shape}") else sparse
        return chosen(relu)

    def _sparse_product(self, x: Array, relu: bool = False) -> Array:
        kernel: Any = self._kernel
        out: Array = kernel.convolve(x, *self.kernel_size, *self.stride, *self.padding, relu)
        return out

    def _weights(self) -> Array:
        if self._dense is not None:
            held: Array = self._dense
            return held
        kernel: Any = self._kernel
        weight: Array = kernel.to_dense().reshape(self.out_channels, self.in_channels, *self.kernel_size)
        return weight

    def _dense_product(self, x: Array, relu: bool = False) -> Array:
        if self._dense is None:
            self._dense = self._weights()
        options = {"stride": self.stride, "padding": self.padding, "activation": "relu" if relu else None}
        out: Array = current_backend().dispatch("conv2d", x, self._dense, self.float_bias, **options)
        return out

    def _beside(self) -> dict[str, Array]:
        return {"geometry": np.array([*self.stride, *self.padding], np.int64)}

    @classmethod
    def _restored(cls, arrays: dict[str, Array]) -> Self:
        sy, sx, py, px = (int(n) for n in arrays["geometry"])
        if max(sy, sx, py, px) > _WIDEST:
            raise ValueError
        return cls(unpacked_array(arrays, np.float32), arrays.get("bias"), (sy, sx), (py, px))


class FoldedNorm(Module):
    """Stands where a batch norm was, whose scale and shift are in the weights of the sparse convolution before it."""

    def forward(self, x: Any) -> Any:
        return x


def sparse_with_norm(conv: Conv2d, norm: BatchNorm2d) -> SparseConv2d:
    """A convolution and the batch norm after it (in eval mode) as one sparse convolution."""
    weight, bias = folded(conv, norm)
    return SparseConv2d(weight.data, bias.data, conv.stride, (conv.padding[0], conv.padding[1]))
