"""Channels magnified before they are rounded, where the layers that read them can take it back.

All channels of an activation share a scale, set by the largest. A channel with smaller values is multiplied up to it in
the weights of the layer that makes it, which have scales of their own, and divided in the weights of those that read
it: the same network, rounded less. Channels that meet (in a sum, in a concatenation that is read as one) are magnified
alike; those that pass through what is not proportional, or leave the network, are left as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.steps import Step
from tilewise.quantize.calibration import Calibration
from tilewise.quantize.graph import Graph
from tilewise.quantize.parameters import AffineParameters

Array = npt.NDArray[Any]
Factors = list[Array]  # by step, a number a channel
_PROPORTIONAL = ("", "relu", "relu6")  # scaled values stay below 6, where ReLU6 changes nothing
_MOST = 4.0  # the readers' weights are divided by it, and rounded in turn


class _Channels:
    """Every channel of every step's result by a number, and which of them are magnified alike."""

    def __init__(self, graph: Graph, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.graph = graph
        counts = [shape[0] if shape else 0 for shape in shapes]
        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.pinned = np.zeros(int(self.first[-1]), bool)
        self.pairs: list[tuple[Array, Array]] = []
        self.shapes = shapes
        for index, step in enumerate(graph.steps):
            self._join(index, step)
        self.pinned[self.of(0)] = self.pinned[self.of(len(graph.steps) - 1)] = True

    def of(self, index: int) -> Array:
        return np.arange(self.first[index], self.first[index + 1])

    def _alike(self, a: Array, b: Array) -> None:
        self.pairs.append((a, b))

    def _join(self, index: int, step: Step) -> None:
        mine, sources = self.of(index), [self.of(i) for i in step.inputs]
        if step.activation not in _PROPORTIONAL or step.kind == "linear":
            self.pinned[mine] = True
        if step.kind in ("conv", "linear", "affine", "input"):  # a residual is added as it is
            joined = [(mine, s) for s in sources[1:]]
        elif step.kind in ("max_pool", "avg_pool", "upsample", "global_mean", "add"):
            joined = [(mine, s) for s in sources]
        elif step.kind == "mul":
            self.pinned[sources[1]] = True
            joined = [(mine, sources[0])]
        elif step.kind == "concat":
            joined = [(mine, np.concatenate(sources))]
        elif step.kind == "slice":
            start = step.options["first"]
            joined = [(mine, sources[0][start : start + len(mine)])]
        elif step.kind == "take":
            joined = [(mine, sources[0][list(step.options["channels"])])]
        elif step.kind == "spread":
            joined = [(np.tile(mine, len(sources[0]) // len(mine)), sources[0])]
        elif step.kind in ("flatten", "same") and sources[0].size and mine.size % sources[0].size == 0:
            joined = [(mine, np.repeat(sources[0], mine.size // sources[0].size))]
        else:
            self.pinned[np.concatenate([mine, *sources])] = True
            joined = []
        for a, b in joined:
            if a.shape == b.shape:
                self._alike(a, b)
            else:
                self.pinned[a] = self.pinned[b] = True

    def least(self, numbers: Array) -> Array:
        """Of each channel, the least number among those that are magnified alike."""
        if self.pairs:
            a, b = (np.concatenate(side) for side in zip(*self.pairs, strict=True))
            while True:
                before, least = numbers, np.minimum(numbers[a], numbers[b])
                numbers = numbers.copy()
                np.minimum.at(numbers, a, least)
                np.minimum.at(numbers, b, least)
                if np.array_equal(before, numbers):
                    break
        return numbers


def factors(
    graph: Graph, calibration: Calibration, parameters: list[AffineParameters], kept: Collection[str]
) -> Factors:
    """What every channel of every step's result is multiplied by, 1 or more; `kept` steps give what they gave."""
    channels = _Channels(graph, calibration.shapes)
    room = np.full(channels.pinned.shape, _MOST)
    for index, p in enumerate(parameters):
        span, mine = np.array(calibration.spans[index]), channels.of(index)
        if len(span) != len(mine) or graph.steps[index].name in kept:
            channels.pinned[mine] = True
            continue
        low, high = -p.zero_point * p.scale, (255 - p.zero_point) * p.scale
        if graph.steps[index].activation == "relu6":  # clamps at 6 also where a tied range reaches further
            high = min(high, 6.0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            up = np.where(span[:, 1] > 0, high / span[:, 1], np.inf)
            down = np.where(span[:, 0] < 0, low / span[:, 0], np.inf)
        room[mine] = np.clip(np.minimum(up, down), 1.0, _MOST)
    room[channels.pinned] = 1.0
    found = channels.least(room)
    return [found[channels.of(i)] for i in range(len(graph.steps))]


def magnify(graph: Graph, by: Factors) -> None:
    """The same network with its channels magnified: steps get weights of their own."""
    for index, step in enumerate(graph.steps):
        if step.kind not in ("conv", "linear", "affine"):
            continue
        read, made = by[step.inputs[0]], by[index]
        if step.kind == "affine":
            weight = np.ones(len(made), np.float32) if step.weight is None else step.weight
            step.weight = (weight * made / read).astype(np.float32)
        elif step.weight is not None:
            step.weight = _scaled(step, read, made)
        if step.bias is not None:
            step.bias = (step.bias * made).astype(np.float32)


def _scaled(step: Step, read: Array, made: Array) -> Array:
    """Weights (O, C / groups, ...): their rows multiplied, their columns divided."""
    assert step.weight is not None
    rest = (1,) * (step.weight.ndim - 2)
    outputs, inner = step.weight.shape[:2]
    groups = step.groups if step.kind == "conv" else 1
    columns = np.repeat(read.reshape(groups, inner), outputs // groups, 0).reshape(outputs, inner, *rest)
    scaled: Array = (step.weight * made.reshape(-1, 1, *rest) / columns).astype(np.float32)
    return scaled
