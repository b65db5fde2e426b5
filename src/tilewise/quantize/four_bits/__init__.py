"""Linear layers with four-bit weights: `quantize(model, data, bits=4)`.

Weights are packed in blocks of 32 (blocks.py). Each row of inputs is quantized to int8 at run time, with one scale per
block of 32. The sums of a block are integers, so that every instruction set and NumPy produce the same floats. With
calibration data, weights are rounded by GPTQ (Frantar et al. 2023) with the second moments of the inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn import Module
from tilewise.nn import functional as F
from tilewise.quantize.block_linear import BlockLinear
from tilewise.quantize.calibration import check_model
from tilewise.quantize.dynamic import replace_linear_layers
from tilewise.quantize.four_bits.blocks import BLOCK, Blocks, round_blocks
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
_MOST_MOMENTS = 1 << 28  # floats of second moments that are collected in one pass over the data


class FourBitLinear(BlockLinear):
    """Linear layer with four-bit weights: float input, float output."""

    def __init__(self, blocks: Blocks, bias: Array | None = None) -> None:
        make = NumpyInt4Weights if native is None else native.BlockMatrix.from_codes
        super().__init__(make(*blocks.arrays()), bias)

    def blocks(self) -> Blocks:
        """Return codes and scales, unpacked."""
        return Blocks(*self.kernel.unpack())

    def __deepcopy__(self, memo: dict[int, Any]) -> FourBitLinear:
        return FourBitLinear(self.blocks(), self.float_bias)


class NumpyInt4Weights:
    """NumPy reference of the packed weights, used if the compiled kernels are missing and to test them."""

    def __init__(self, codes: Array, scales: Array, minimums: Array | None, column_scale: Array) -> None:
        # (outputs, blocks * 32) codes, two per byte: the even one in the low half.
        padded = np.zeros((len(codes), scales.shape[1] * BLOCK), np.uint8)
        padded[:, : codes.shape[1]] = codes
        self._packed = padded[:, 0::2] | padded[:, 1::2] << 4
        self._inputs, self._scales, self._minimums, self._column_scale = codes.shape[1], scales, minimums, column_scale
        self.shape = codes.shape

    @property
    def nbytes(self) -> int:
        minimums = 0 if self._minimums is None else self._minimums.nbytes
        return int(self._packed.nbytes + self._scales.nbytes + minimums + self._column_scale.nbytes)

    def unpack(self) -> tuple[Array, Array, Array | None, Array]:
        return self._codes()[:, : self._inputs].copy(), self._scales, self._minimums, self._column_scale

    def rows(self, indices: Array) -> Array:
        """Return outputs of the weight as float32 (n, inputs)."""
        rows: Array = Blocks(*self.unpack()).dequantize()[indices]
        return rows

    def _codes(self) -> Array:
        codes = np.empty((len(self._packed), 2 * self._packed.shape[1]), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = self._packed & 15, self._packed >> 4
        return codes

    def linear(self, x: Array) -> Array:
        """Compute x @ weight.T for float32 x (N, inputs) with exact integer sums per block."""
        q, row_scale, row_sum = quantize_row_blocks(x)
        codes = self._codes()
        out = np.zeros((len(x), len(codes)), np.float32)
        with np.errstate(all="ignore"):
            # Blocks are added in the order of the native kernel: float addition is not associative.
            for b in range(self._scales.shape[1]):
                block = slice(b * BLOCK, (b + 1) * BLOCK)
                sums = q[:, block].astype(np.int32) @ codes[:, block].T.astype(np.int32)  # (N, O)
                self._add_block(out, b, sums, row_scale[:, b : b + 1], row_sum[:, b : b + 1])
            return out * self._column_scale

    def _add_block(self, out: Array, block: int, sums: Array, row_scale: Array, row_sum: Array) -> None:
        """Add a block's dequantized sums to `out` (N, O)."""
        scale = self._scales[:, block].astype(np.float32) * row_scale
        if self._minimums is None:
            # Symmetric codes are stored with an offset of 8.
            out += (sums - 8 * row_sum).astype(np.float32) * scale
            return
        # Asymmetric codes: weight = scale * code + minimum, so the minimum multiplies the sum of the inputs.
        out += sums.astype(np.float32) * scale
        out += self._minimums[:, block].astype(np.float32) * (row_scale * row_sum.astype(np.float32))


def quantize_row_blocks(rows: Array) -> tuple[Array, Array, Array]:
    """Quantize float32 (N, K) to int8 (N, blocks * 32); return it with the scale and sum of each block (N, blocks).

    The number of blocks is even; the last ones are padded with zeros.
    """
    width = -(-rows.shape[1] // (2 * BLOCK)) * 2 * BLOCK
    padded = np.zeros((len(rows), width), np.float32)
    padded[:, : rows.shape[1]] = np.where(np.isnan(rows), np.float32(0), rows)
    blocks = padded.reshape(len(rows), -1, BLOCK)
    largest = np.abs(blocks).max(2)
    # A block of zeros, or of values so small that the inverse scale overflows, becomes zeros.
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / largest
        inverse = np.where((largest > 0) & np.isfinite(inverse), inverse, np.float32(0))
        q = np.rint(np.nan_to_num(blocks * inverse[..., None])).astype(np.int8)
    return q.reshape(len(rows), width), largest / np.float32(127), q.sum(2, dtype=np.int32)


def quantize_four_bits(model: Module, data: Iterable[Any] | None = None, symmetric: bool = True) -> Module:
    """Return a copy of `model` with four-bit linear layers. `data`: calibration batches for GPTQ rounding."""
    check_model(model)
    batches = None if data is None else list(data)
    if batches is not None and not batches:
        raise ConfigurationError("the calibration data is empty: rounding by it needs at least one input")
    out = copy.deepcopy(model).eval()
    places = watch(out)
    if not places:
        raise ConfigurationError("this model has no linear layer whose weights could be four bits")
    # The second moments of all layers may exceed the memory: each pass over the data serves as many layers as fit.
    while places:
        now = _first_pass(places)
        if batches is not None:
            _collect(out, batches, [getattr(parent, name) for parent, name in now])
        for parent, name in now:
            watched: _MomentCollector = getattr(parent, name)
            blocks = round_blocks(watched.linear.weight.data, symmetric, watched.moments)
            bias = watched.linear.bias
            setattr(parent, name, FourBitLinear(blocks, None if bias is None else bias.data))
        places = places[len(now) :]
    return out


class _MomentCollector(Module):
    """Linear layer that collects the second moments of its inputs while `watching` is set."""

    plans_itself = False

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.watching, self.row_count = False, 0
        self.moments: Array | None = None

    def forward(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        if self.watching:
            # GPTQ needs E[x x^T] over all rows (tokens); `_collect` divides by their number.
            rows = x.data.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
            new, self.row_count = rows.T @ rows, self.row_count + len(rows)  # (inputs, inputs)
            self.moments = new if self.moments is None else self.moments + new
        return F.linear(x, self.linear.weight, self.linear.bias, activation=activation, residual=residual)


def watch(module: Module) -> list[tuple[Module, str]]:
    """Wrap every linear layer in a collector; return the (parent, attribute name) of each, in model order."""
    return replace_linear_layers(module, _MomentCollector)


def _first_pass(places: list[tuple[Module, str]]) -> list[tuple[Module, str]]:
    """Return as many layers as the memory for second moments allows, at least one."""
    total, count = 0, 0
    for parent, name in places:
        total += getattr(parent, name).linear.weight.shape[1] ** 2
        if count and total > _MOST_MOMENTS:
            break
        count += 1
    return places[:count]


def _model_input(batch: Any) -> Any:
    """Convert a calibration batch: floats to a Tensor, token ids unchanged."""
    values = batch.data if isinstance(batch, Tensor) else np.asarray(batch)
    if values.dtype.kind not in "fiu" or values.ndim < 2:
        raise ShapeError(f"a calibration batch is an array of inputs, not {values.dtype} of shape {values.shape}")
    return values if values.dtype.kind in "iu" else Tensor(values.astype(np.float32, copy=False))


def _collect(model: Module, batches: list[Any], layers: list[_MomentCollector]) -> None:
    """Run the batches through the model and average the second moments of these layers."""
    for layer in layers:
        layer.watching = True
    with no_grad():
        for batch in batches:
            model(_model_input(batch))
    for layer in layers:
        layer.watching = False
        if layer.moments is None:
            raise ConfigurationError("a linear layer of this model saw none of the calibration data")
        layer.moments = layer.moments / np.float32(layer.row_count)
        if not np.isfinite(layer.moments).all():
            raise ConfigurationError("the calibration data gives NaN or infinity inside the model")
