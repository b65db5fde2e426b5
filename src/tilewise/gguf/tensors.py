"""Tensor formats of GGUF: their sizes, their conversion to float32, and the kernels that multiply by them as they are.

A tensor is a sequence of blocks. A quantized block of 32 values begins with a float16 scale (Q4_1, Q5_1: and a
minimum). The 4-bit codes of the first 16 values are the low halves of its bytes, those of the last 16 the high halves;
Q5 formats store the fifth bits in 32 more bits. K formats have blocks of 256 values: one float16 scale (and minimum),
multiplied by a small integer per group of 32 (Q6_K: 16) values. Layouts: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.tensor import Array

# Values of IQ4_NL's codes.
_NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@dataclass(frozen=True)
class TensorKind:
    """Values and bytes per block of a format, and its conversion of blocks (n, block_bytes) to float32 (n, block)."""

    name: str
    block: int
    block_bytes: int
    to_floats: Callable[[Array], Array]


def _read_float16(raw: Array, at: int) -> Array:
    """Return the float16 number at byte `at` of each block as float32, (n, 1)."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _codes(packed: Array) -> Array:
    """Unpack 4-bit codes (n, bytes), all low halves before all high halves."""
    return np.concatenate([packed & 15, packed >> 4], 1)


def _five_bit_codes(raw: Array, at: int) -> Array:
    """Unpack 5-bit codes: 32 high bits from byte `at` of each block on, then the low 4 bits."""
    fifth = np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little")
    codes: Array = (_codes(raw[:, at + 4 :]) | fifth << 4).astype(np.float32)
    return codes


def _k_codes(packed: Array) -> Array:
    """Unpack the 4-bit codes of Q4_K and Q5_K, (n, 8, 32): low halves of 32 bytes, then their high halves."""
    chunks = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], 2).reshape(-1, 8, 32)


def _scale_k(raw: Array, codes: Array) -> Array:
    """Dequantize codes (n, 8, 32) of Q4_K and Q5_K: each group has a 6-bit scale and a 6-bit minimum."""
    packed = raw[:, 4:16]
    first, second, upper = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    multiples = np.concatenate([first & 63, (upper & 15) | (first >> 6 << 4)], 1).astype(np.float32)
    minimums = np.concatenate([second & 63, (upper >> 4) | (second >> 6 << 4)], 1).astype(np.float32)
    values = (_read_float16(raw, 0) * multiples)[:, :, None] * codes - (_read_float16(raw, 2) * minimums)[:, :, None]
    return values.reshape(-1, 256)


def _q5_k(raw: Array) -> Array:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (n, 8, 32)
    return _scale_k(raw, (_k_codes(raw[:, 48:]) | fifth << 4).astype(np.float32))


def _q6_k(raw: Array) -> Array:
    """Dequantize Q6_K: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 group scales, one float16 scale."""
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 32)
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)  # (n, 16): one per group of 16 values
    # Each half of a block stores four runs of 32 codes: low nibbles, then high nibbles, of two runs of bytes.
    quarters = [(low[:, :, :32] & 15), (low[:, :, 32:] & 15), (low[:, :, :32] >> 4), (low[:, :, 32:] >> 4)]
    codes = np.stack([q | (high >> 2 * i & 3) << 4 for i, q in enumerate(quarters)], 2)  # (n, 2, 4, 32)
    values = codes.reshape(-1, 16, 16).astype(np.float32) - 32
    return (values * (_read_float16(raw, 208) * scales)[:, :, None]).reshape(-1, 256)


KINDS = {
    0: TensorKind("F32", 1, 4, lambda raw: raw.view("<f4").astype(np.float32, copy=False)),
    1: TensorKind("F16", 1, 2, lambda raw: raw.view("<f2").astype(np.float32)),
    2: TensorKind("Q4_0", 32, 18, lambda raw: _read_float16(raw, 0) * (_codes(raw[:, 2:]).astype(np.float32) - 8)),
    3: TensorKind(
        "Q4_1",
        32,
        20,
        lambda raw: _read_float16(raw, 0) * _codes(raw[:, 4:]).astype(np.float32) + _read_float16(raw, 2),
    ),
    6: TensorKind("Q5_0", 32, 22, lambda raw: _read_float16(raw, 0) * (_five_bit_codes(raw, 2) - 16)),
    7: TensorKind("Q5_1", 32, 24, lambda raw: _read_float16(raw, 0) * _five_bit_codes(raw, 4) + _read_float16(raw, 2)),
    8: TensorKind("Q8_0", 32, 34, lambda raw: _read_float16(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)),
    12: TensorKind("Q4_K", 256, 144, lambda raw: _scale_k(raw, _k_codes(raw[:, 16:]).astype(np.float32))),
    13: TensorKind("Q5_K", 256, 176, _q5_k),
    14: TensorKind("Q6_K", 256, 210, _q6_k),
    20: TensorKind("IQ4_NL", 32, 18, lambda raw: _read_float16(raw, 0) * _NON_LINEAR[_codes(raw[:, 2:])]),
    30: TensorKind("BF16", 1, 2, lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)),
}
_CODES = {kind.name: code for code, kind in KINDS.items()}


class NumpyBlocks:
    """A matrix in quantized blocks, without compiled kernels: rows are dequantized on demand."""

    def __init__(self, kind: TensorKind, raw: Array, shape: tuple[int, int]) -> None:
        self.kind, self.shape, self._raw = kind, shape, raw.reshape(shape[0], -1)
        self.nbytes = raw.nbytes

    def rows(self, indices: Array) -> Array:
        """Dequantize the rows `indices` to float32 (n, columns)."""
        raw = np.ascontiguousarray(self._raw[indices]).reshape(-1, self.kind.block_bytes)
        return self.kind.to_floats(raw).reshape(len(indices), self.shape[1])

    def linear(self, x: Array) -> Array:
        """Multiply x (n, columns) by the transposed matrix."""
        product: Array = x @ self.rows(np.arange(self.shape[0])).T
        return product


def packed_bytes(kind: TensorKind, shape: tuple[int, int]) -> int:
    """Return the bytes that a packed matrix takes in an arena; 0 for formats that stay in the file."""
    return 0 if native is None else int(native.packed_block_bytes(_CODES[kind.name], *shape))


def block_matrix(kind: TensorKind, raw: Array, shape: tuple[int, int], arena: Any = None) -> Any:
    """Create the kernel that multiplies by a matrix: integer formats are packed, floats stay in the file."""
    if native is None:
        return NumpyBlocks(kind, raw, shape)
    return native.BlockMatrix(_CODES[kind.name], raw.reshape(-1), *shape, arena)


def block_rows(kind: TensorKind, raw: Array, shape: tuple[int, int]) -> Any:
    """Create the kernel that looks up rows of a (rows, width) table, which stays in the file's format."""
    return (
        NumpyBlocks(kind, raw, shape)
        if native is None
        else native.BlockRows(_CODES[kind.name], raw.reshape(-1), *shape)
    )
