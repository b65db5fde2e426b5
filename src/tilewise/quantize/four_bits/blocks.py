"""Round a weight matrix to four bits in blocks of 32: to nearest, or by GPTQ (Frantar et al. 2023).

A weight is `scale * (code - 8)`, or `scale * code + minimum`, with a code from 0 to 15. Scale and minimum are float16,
in units of `column_scale`, a power of two per output, so that weights of any magnitude fit the range of float16. Each
block tries several scales and keeps the one with the smallest error. Given the second moments of the layer's inputs,
errors are weighted by them, and each column's error is compensated by the columns that are not rounded yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.quantize.gptq import inverse_factor, round_columns
from tilewise.tensor import Array

BLOCK = 32
_LARGEST = 12  # exponent of the largest weight of an output in its units: float16 holds it
_ROWS = 1 << 15  # blocks rounded at a time: bounds the temporary arrays
# Candidate scales, relative to the scale that maps the largest weight to the end of the grid. That scale comes first,
# so that weights which are already on such a grid keep their codes.
_CANDIDATES = (1.0, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 8 / 7)


@dataclass(frozen=True)
class Blocks:
    """Four-bit matrix (O, K): codes (O, K), scales and minimums (O, K / 32 rounded up), column_scale (O)."""

    codes: Array
    scales: Array
    minimums: Array | None
    column_scale: Array

    def arrays(self) -> tuple[Array, Array, Array | None, Array]:
        """Return codes, scales, minimums and column_scale in the order of the kernels' arguments."""
        return self.codes, self.scales, self.minimums, self.column_scale

    def dequantize(self) -> Array:
        """Return the float32 weights (O, K)."""
        codes, scales = self.codes.astype(np.float32), self._expand_to_weights(self.scales)
        if self.minimums is None:
            return (codes - 8) * scales
        return codes * scales + self._expand_to_weights(self.minimums)

    def _expand_to_weights(self, numbers: Array) -> Array:
        """Multiply one number per block (O, blocks) by the column scale and repeat it for each weight: (O, K)."""
        expanded: Array = np.repeat(numbers.astype(np.float32) * self.column_scale[:, None], BLOCK, 1)
        return expanded[:, : self.codes.shape[1]]


def round_blocks(weight: Array, symmetric: bool = True, moments: Array | None = None) -> Blocks:
    """Round a float matrix (O, K) to four bits. `moments` (K, K) is the mean of x xᵀ over the layer's inputs."""
    weight = np.asarray(weight, np.float32)
    if not np.isfinite(weight).all():
        raise ConfigurationError("the weights hold NaN or infinity, which have no four-bit form")
    column_scale = _column_scale(weight)
    padded = np.zeros((len(weight), -(-weight.shape[1] // BLOCK) * BLOCK), np.float32)
    padded[:, : weight.shape[1]] = weight / column_scale[:, None]
    if moments is None:
        codes, scales, minimums = _round_to_nearest(padded, symmetric)
    else:
        codes, scales, minimums = _round_by_gptq(padded, symmetric, inverse_factor(moments, padded.shape[1]))
    return Blocks(np.ascontiguousarray(codes[:, : weight.shape[1]]), scales, minimums, column_scale)


def _column_scale(weight: Array) -> Array:
    """Return each output's power-of-two scale (O,), with which its largest weight fits into float16."""
    largest = np.abs(weight).max(1, initial=0)
    _, exponent = np.frexp(np.where(largest > 0, largest, 1))
    unit: Array = np.ldexp(np.float32(1), np.maximum(exponent - 1 - _LARGEST, -126)).astype(np.float32)
    return unit


# --- one block ---


def _fit_scales(blocks: Array, symmetric: bool, importance: Array | None) -> tuple[Array, Array | None]:
    """Find the scale (n,) of each block (n, 32), and its minimum if not `symmetric`, with the least squared error.

    `importance` (32,) weights the squared errors of the columns; None weights them equally.
    """
    low, high = np.minimum(blocks.min(1), 0), np.maximum(blocks.max(1), 0)
    if symmetric:  # codes reach from -8 to 7: the larger side gets -8
        start, offset = np.where(-low >= high, low, high) / -8, None
    else:
        low, high = blocks.min(1), blocks.max(1)
        start, offset = (high - low) / 15, low
    best_scale, best_offset = _to_half_precision(start), None if offset is None else _to_half_precision(offset)
    best = np.full(len(blocks), np.inf)
    for candidate in _CANDIDATES:
        scale = _to_half_precision(start * np.float32(candidate))
        shift = None if offset is None else _to_half_precision(offset + start * np.float32(7.5 * (1 - candidate)))
        error = np.square(blocks - _dequantize_codes(_quantize_codes(blocks, scale, shift), scale, shift))
        total = error.sum(1) if importance is None else error @ importance
        better = total < best
        best, best_scale = np.where(better, total, best), np.where(better, scale, best_scale)
        if shift is not None and best_offset is not None:
            best_offset = np.where(better, shift, best_offset)
    return best_scale, best_offset


def _to_half_precision(numbers: Array) -> Array:
    """Round to the nearest float16 values, returned as float32."""
    return numbers.astype(np.float16).astype(np.float32)


def _quantize_codes(values: Array, scale: Array, minimum: Array | None) -> Array:
    """Quantize values (n, k) to codes 0 to 15 with the scale of each row (n,).

    Code 8 is zero if `minimum` is None; otherwise code 0 is the row's minimum.
    """
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    steps = values * inverse[:, None] + 8 if minimum is None else (values - minimum[:, None]) * inverse[:, None]
    codes: Array = np.clip(np.rint(steps), 0, 15)
    return codes


def _dequantize_codes(codes: Array, scale: Array, minimum: Array | None) -> Array:
    """Dequantize codes (n, k), the inverse of `_quantize_codes`: zero is code 8, or code 0 is the row's minimum."""
    return (codes - 8) * scale[:, None] if minimum is None else codes * scale[:, None] + minimum[:, None]


# --- a matrix ---


def _round_to_nearest(weight: Array, symmetric: bool) -> tuple[Array, Array, Array | None]:
    """Round a weight (O, K) to the nearest codes (O, K); return them with scales and minimums (O, K / 32)."""
    outputs, width = weight.shape
    blocks = weight.reshape(-1, BLOCK)
    codes = np.empty(blocks.shape, np.uint8)
    scales = np.empty(len(blocks), np.float16)
    minimums = None if symmetric else np.empty(len(blocks), np.float16)
    for first in range(0, len(blocks), _ROWS):
        rows = slice(first, first + _ROWS)
        scale, minimum = _fit_scales(blocks[rows], symmetric, None)
        codes[rows], scales[rows] = _quantize_codes(blocks[rows], scale, minimum), scale
        if minimums is not None:
            minimums[rows] = minimum
    shape = (outputs, width // BLOCK)
    return codes.reshape(weight.shape), scales.reshape(shape), None if minimums is None else minimums.reshape(shape)


def _round_by_gptq(weight: Array, symmetric: bool, upper: Array) -> tuple[Array, Array, Array | None]:
    """Round a weight (O, K) by GPTQ; return codes (O, K), scales and minimums (O, K / 32).

    `upper` (K, K) is the upper Cholesky factor of the inverse second moments of the inputs. There are no minimums if
    `symmetric`.
    """
    outputs, width = weight.shape
    codes = np.empty(weight.shape, np.uint8)
    scales = np.empty((outputs, width // BLOCK), np.float16)
    minimums = None if symmetric else np.empty_like(scales)
    grid: tuple[Array, Array | None] = (np.zeros(0), None)

    def begin(first: int, block: Array, importance: Array) -> None:
        """Choose the scales of the block of columns that starts at `first`, before these are rounded."""
        # The scale of a block is chosen when its first column is due, after earlier columns were compensated.
        nonlocal grid
        grid = _fit_scales(block, symmetric, importance)
        scales[:, first // BLOCK] = grid[0]
        if minimums is not None and grid[1] is not None:
            minimums[:, first // BLOCK] = grid[1]

    def round_column(index: int, column: Array) -> Array:
        code = _quantize_codes(column[:, None], *grid)
        codes[:, index] = code[:, 0]
        return _dequantize_codes(code, *grid)[:, 0]

    round_columns(weight, upper, round_column, BLOCK, begin)
    return codes, scales, minimums
