"""Layers whose weights stay in quantized blocks or in 16 bits: the linear layers and embeddings of GGUF files.

A block of 32 weights shares a scale. A row of inputs becomes int8 with a scale per block of 32, so the sums of a block
are integers and equal on every instruction set. A kernel has `linear(x)`, `rows(indices)`, `shape` and `nbytes`:
`native.BlockMatrix`, `native.BlockRows` (rows only) or a NumPy class without the compiled extension.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, GradientError, ShapeError
from tilewise.nn import Module
from tilewise.tensor import Array, Tensor, is_grad_enabled


class BlockLinear(Module):
    """Linear layer, y = x @ weight.T + bias, with the weight in quantized blocks; inputs and outputs are floats."""

    computes_in_int8 = True

    def __init__(self, kernel: Any, bias: Array | None = None) -> None:
        self.kernel = kernel
        self.out_features, self.in_features = kernel.shape
        self.float_bias = None if bias is None else np.ascontiguousarray(bias, np.float32)

    @property
    def nbytes(self) -> int:
        """Memory of the weight (codes and scales) and the bias in bytes."""
        return int(self.kernel.nbytes) + (0 if self.float_bias is None else self.float_bias.nbytes)

    def dequantize(self) -> Array:
        """Return the float32 weight (outputs, inputs) that the blocks stand for."""
        weight: Array = self.kernel.rows(np.arange(self.out_features))
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockLinear:
        """Return a copy that shares the packed weight, which is immutable."""
        return type(self)(self.kernel, self.float_bias)

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Tensor:
        """Multiply float rows (..., inputs) with the blocks, then add bias and residual and apply the activation."""
        if is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise GradientError("a layer with quantized weights has no gradient; run it under no_grad()")
        values = x.data if isinstance(x, Tensor) else np.asarray(x)
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"{type(self).__name__} takes (..., {self.in_features}), not {values.shape}")
        # All leading axes become rows (N, inputs) of one product.
        rows = np.ascontiguousarray(values.reshape(-1, self.in_features), np.float32)
        out: Array = self.kernel.linear(rows).reshape(*values.shape[:-1], self.out_features)
        # Bias, residual and activation stay in float32.
        if self.float_bias is not None:
            out += self.float_bias
        if residual is not None:
            out += residual.data if isinstance(residual, Tensor) else residual
        return Tensor(out if activation is None else current_backend().dispatch(activation, out))


class BlockEmbedding(Module):
    """Look up rows of a table in blocks; ids (...) give float32 (..., width)."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockEmbedding:
        """Return a copy that shares the packed table, which is immutable."""
        return BlockEmbedding(self.kernel)

    def forward(self, ids: Any) -> Tensor:
        """Look up the rows of integer ids; returns floats of shape (*ids.shape, width)."""
        indices = np.asarray(ids.data if isinstance(ids, Tensor) else ids)
        if indices.size and not 0 <= indices.min() <= indices.max() < self.kernel.shape[0]:
            raise ConfigurationError(f"an index is outside the {self.kernel.shape[0]} rows of the embedding")
        # Only the rows that are looked up are dequantized.
        rows: Array = self.kernel.rows(np.ascontiguousarray(indices.reshape(-1), np.int64))
        return Tensor(rows.reshape(*indices.shape, self.kernel.shape[1]))
