"""Tensor formats of GGUF and their conversion to float32; INT4 formats can also be kept as `Blocks`.

A tensor is a sequence of blocks. A quantized block of 32 values begins with a float16 scale (Q4_1: and a minimum). The
4-bit codes of the first 16 values are the low halves of its bytes, those of the last 16 the high halves. Q6_K, which
llama.cpp uses for the output layer of Q4_0 files, has blocks of 256 values: 16 groups with an 8-bit scale each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.quantize.four_bits.blocks import Blocks

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorKind:
    """Values and bytes per block of a format, and its conversion of blocks (n, block_bytes) to float32 (n, block)."""

    name: str
    block: int
    block_bytes: int
    to_floats: Callable[[Array], Array]


def _f32(raw: Array) -> Array:
    return raw.view("<f4").astype(np.float32, copy=False)


def _f16(raw: Array) -> Array:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: Array) -> Array:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(raw: Array, at: int) -> Array:
    """Read the float16 number at byte `at` of each block, (n, 1)."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _q8_0(raw: Array) -> Array:
    return _half(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)


def _codes(packed: Array) -> Array:
    """Unpack 4-bit codes: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], 1)


def _q4_0(raw: Array) -> Array:
    return _half(raw, 0) * (_codes(raw[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: Array) -> Array:
    return _half(raw, 0) * _codes(raw[:, 4:]).astype(np.float32) + _half(raw, 2)


def _q6_k(raw: Array) -> Array:
    """Convert Q6_K: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 group scales, one float16 scale."""
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 32)
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)  # (n, 16): one per group of 16 values
    # Each half of a block stores four runs of 32 codes: low nibbles, then high nibbles, of two runs of bytes.
    quarters = [(low[:, :, :32] & 15), (low[:, :, 32:] & 15), (low[:, :, :32] >> 4), (low[:, :, 32:] >> 4)]
    codes = np.stack([q | (high >> 2 * i & 3) << 4 for i, q in enumerate(quarters)], 2)  # (n, 2, 4, 32)
    values = codes.reshape(-1, 16, 16).astype(np.float32) - 32
    return (values * (_half(raw, 208) * scales)[:, :, None]).reshape(-1, 256)


KINDS = {
    0: TensorKind("F32", 1, 4, _f32),
    1: TensorKind("F16", 1, 2, _f16),
    2: TensorKind("Q4_0", 32, 18, _q4_0),
    3: TensorKind("Q4_1", 32, 20, _q4_1),
    8: TensorKind("Q8_0", 32, 34, _q8_0),
    14: TensorKind("Q6_K", 256, 210, _q6_k),
    30: TensorKind("BF16", 1, 2, _bf16),
}
FOUR_BITS = ("Q4_0", "Q4_1")


def four_bit_blocks(kind: TensorKind, raw: Array, shape: tuple[int, ...]) -> Blocks:
    """Convert a matrix in Q4_0 or Q4_1 without changing its codes and scales."""
    header_bytes = 2 if kind.name == "Q4_0" else 4  # a float16 scale, and in Q4_1 a float16 minimum
    block_grid = (shape[0], shape[1] // kind.block)
    headers = np.ascontiguousarray(raw[:, :header_bytes]).view("<f2").astype(np.float16, copy=False)
    minimums = None if header_bytes == 2 else np.ascontiguousarray(headers[:, 1]).reshape(block_grid)
    scales = np.ascontiguousarray(headers[:, 0]).reshape(block_grid)
    return Blocks(_codes(raw[:, header_bytes:]).reshape(shape), scales, minimums, np.ones(shape[0], np.float32))
