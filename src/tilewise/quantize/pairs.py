"""How a layer's products stay exact on AVX2, whose instruction for bytes adds two products in 16 bits and saturates.

Weights of a channel no pair of which can exceed 16 bits, whatever the activations, are proven safe. A layer of such
channels takes the instruction as it is. In other layers the activations are split: what a pair has too much is cut off
and multiplied separately. No weight is rounded to fewer bits for it, so the integers are those of every other
instruction set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear

Array = npt.NDArray[Any]
_LARGEST_ACTIVATION, _LARGEST_SUM = 255, 32767


def overflowing_channels(weights: Array) -> int:
    """Of weights (O, kh, kw, C): channels with a pair of neighbours whose products might not fit into 16 bits."""
    wide = weights.astype(np.int16)
    if wide.shape[-1] % 2:
        wide = np.concatenate([wide, np.zeros_like(wide[..., :1])], -1)
    pairs = wide.reshape(len(wide), -1, 2)  # (O, pairs, 2)
    most = np.maximum(np.maximum(pairs, 0).sum(2), np.maximum(-pairs, 0).sum(2)).max(1, initial=0)
    return int((most.astype(np.int64) * _LARGEST_ACTIVATION > _LARGEST_SUM).sum())


def avx2_products(layer: Any) -> str:
    """How an integer layer multiplies on AVX2 without VNNI; nothing for one that has no products."""
    if not isinstance(layer, QuantizedConv2d | QuantizedLinear):
        return ""
    if isinstance(layer, QuantizedConv2d) and not layer.geometry.is_plain:
        return "16-bit products"  # depthwise and grouped convolutions widen their bytes
    weights = layer.kernel.weights()
    unsafe = overflowing_channels(weights)
    return f"split activations: {unsafe} of {len(weights)} channels" if unsafe else "pairs, proven"
