"""Answers to the exercises on quantization."""

import numpy as np


def affine(low, high):
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    return scale, round(-low / scale)


def quantize_rows(weights):
    largest = np.abs(weights).max(axis=tuple(range(1, weights.ndim)))
    scale = np.where(largest > 0, largest / 127, 1.0)
    wide = scale.reshape(-1, *[1] * (weights.ndim - 1))
    return np.rint(weights / wide).astype(np.int8), scale


def integer_product(x, zero_point, w):
    wide = w.astype(np.int32)
    return x.astype(np.int32) @ wide - np.int32(zero_point) * wide.sum(axis=0, dtype=np.int32)
