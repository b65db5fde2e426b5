"""GPTQ rounding of convolution weights to int8, with input statistics of the calibration images.

Second moments of an activation's channels are taken around their means, because bias correction accounts for the means.
With few pixels per channel the moments between channels are unreliable and are shrunk towards zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.graph.ir import Op
from tilewise.quantize.graph import FloatGraph
from tilewise.quantize.parameters import QuantizedWeights
from tilewise.quantize.saturation import gptq_weights

Array = npt.NDArray[Any]
_MAX_CHANNELS = 2048  # arbitrary; the moments take this many squared floats


class GptqRounding:
    """Rounds the weights of a graph's convolutions on demand, and caches them for all candidate models."""

    def __init__(self, graph: FloatGraph, x: Array) -> None:
        sources = {s.inputs[0] for s in graph.steps if _is_plain(s)}
        self.moments: dict[int, Array] = {}
        self._cache: dict[int, tuple[Array, QuantizedWeights]] = {}
        graph.run(x, lambda i, result: self._observe(i, result) if i in sources else None)

    def _observe(self, index: int, result: Array) -> None:
        if result.ndim == 4 and result.shape[1] <= _MAX_CHANNELS:
            self.moments[index] = _moments(np.moveaxis(result, 1, 0).reshape(result.shape[1], -1))

    def weights(self, index: int, step: Op, by: Array | None) -> QuantizedWeights | None:
        """Round the weights of a step whose input has equalization scales `by`; None if its input was not observed."""
        moments = self.moments.get(step.inputs[0])
        if moments is None or step.weight is None or not _is_plain(step):
            return None
        cached = self._cache.get(index)
        if cached is None or not np.array_equal(cached[0], step.weight):
            scaled = moments if by is None else moments * by * by[:, None]
            cached = step.weight, gptq_weights(step.weight, scaled)
            self._cache[index] = cached
        return cached[1]


def _is_plain(step: Op) -> bool:
    return step.kind == "conv" and step.groups == 1


def _moments(pixels: Array) -> Array:
    """Second moments of channels (C, pixels) around their means."""
    channels, count = pixels.shape
    centred = pixels - pixels.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
    moments: Array = (centred @ centred.T).astype(np.float64) / count
    own = np.diag(moments).copy()
    moments *= count / (count + channels)
    np.fill_diagonal(moments, own)
    return moments
