"""The forms in which GGUF stores numbers, and how each becomes float32; four-bit ones become `Blocks` as they are.

A tensor is a row of blocks. A quantized block of 32 begins with a scale in half precision (Q4_1: and a minimum);
four-bit codes of the first 16 values are the low halves of its bytes, those of the last 16 the high halves. Q6_K, which
llama.cpp puts into the output layer of its Q4_0 files, has blocks of 256: 16 groups with a scale of 8 bits each.
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
    """Values of a block, its bytes, and the way from blocks (n, block_bytes) to float32 (n, block)."""

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
    """The half-precision number at byte `at` of each block, (n, 1)."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _q8_0(raw: Array) -> Array:
    return _half(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)


def _codes(packed: Array) -> Array:
    return np.concatenate([packed & 15, packed >> 4], 1)


def _q4_0(raw: Array) -> Array:
    return _half(raw, 0) * (_codes(raw[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: Array) -> Array:
    return _half(raw, 0) * _codes(raw[:, 4:]).astype(np.float32) + _half(raw, 2)


def _q6_k(raw: Array) -> Array:
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 32)
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)  # of 16 groups of 16
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
    """A matrix of Q4_0 or Q4_1 with its own codes and scales."""
    first = 2 if kind.name == "Q4_0" else 4
    per_block = (shape[0], shape[1] // kind.block)
    numbers = np.ascontiguousarray(raw[:, :first]).view("<f2").astype(np.float16, copy=False)
    minimums = None if first == 2 else np.ascontiguousarray(numbers[:, 1]).reshape(per_block)
    scales = np.ascontiguousarray(numbers[:, 0]).reshape(per_block)
    return Blocks(_codes(raw[:, first:]).reshape(shape), scales, minimums, np.ones(shape[0], np.float32))
