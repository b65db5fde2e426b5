"""Weights of convolutions in bytes, rounded by what the layers read on calibration images.

The second moments of an activation's channels are kept around their means, which the bias takes care of. Few pixels
tell little about many channels: as many of the moments between channels are believed as there are pixels for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.steps import Step
from tilewise.quantize.graph import Graph
from tilewise.quantize.pairs import compensated_weights
from tilewise.quantize.parameters import QuantizedWeights

Array = npt.NDArray[Any]
_MOST_CHANNELS = 2048  # whose moments are kept


class Rounding:
    """Rounds the weights of a graph's convolutions when first asked for them, for all models that are made of it."""

    def __init__(self, graph: Graph, x: Array) -> None:
        read = {s.inputs[0] for s in graph.steps if _is_plain(s)}
        self.moments: dict[int, Array] = {}
        self._made: dict[int, tuple[Array, QuantizedWeights]] = {}
        graph.run(x, lambda i, result: self._see(i, result) if i in read else None)

    def _see(self, index: int, result: Array) -> None:
        if result.ndim == 4 and result.shape[1] <= _MOST_CHANNELS:
            self.moments[index] = _moments(np.moveaxis(result, 1, 0).reshape(result.shape[1], -1))

    def weights(self, index: int, step: Step, by: Array | None) -> QuantizedWeights | None:
        """The weights of a step, for an input of bytes that is magnified by `by`; None where nothing is known of it."""
        moments = self.moments.get(step.inputs[0])
        if moments is None or step.weight is None or not _is_plain(step):
            return None
        known = self._made.get(index)
        if known is None or not np.array_equal(known[0], step.weight):
            scaled = moments if by is None else moments * by * by[:, None]
            known = step.weight, compensated_weights(step.weight, scaled)
            self._made[index] = known
        return known[1]


def _is_plain(step: Step) -> bool:
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
