"""Cross-layer equalization (Nagel et al. 2019, section 4.1).

All channels of an activation share one scale, which the largest channel sets. A channel with smaller values is scaled
up in the weights of the layer that computes it, which have a scale per output channel, and scaled down in the weights
of the layers that read it. The network computes the same function with less rounding error. Channels that are added
or concatenated get the same equalization scale. Channels behind an operation that does not commute with scaling, and
those of the network's result, are not scaled.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tilewise.graph.ir import Array, Op
from tilewise.graph.op_specs.functions import is_leaky
from tilewise.quantize.calibration import Calibration
from tilewise.quantize.graph import FloatGraph
from tilewise.quantize.parameters import AffineParameters

EqualizationScales = list[Array]  # per step, one scale per channel
# Activations that commute with a positive scale; ReLU6 does because scaled values are kept below 6.
_PROPORTIONAL = ("", "relu", "relu6")
_MAX_SCALE = 4.0  # arbitrary; the readers' weights are divided by it, and their rounding error grows


class _TiedChannels:
    """Gives the channels of all results consecutive numbers, and records which must have the same scale."""

    def __init__(self, graph: FloatGraph, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Record which channels must share a scale; those of the network's input and result have scale 1.

        `shapes` are the shapes of all results without the batch.
        """
        self.graph = graph
        counts = [shape[0] if shape else 0 for shape in shapes]
        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.pinned = np.zeros(int(self.first[-1]), bool)
        self.tied_channels: list[tuple[Array, Array]] = []
        self.shapes = shapes
        for index, step in enumerate(graph.steps):
            self._join(index, step)
        self.pinned[self.of(0)] = self.pinned[self.of(len(graph.steps) - 1)] = True

    def of(self, index: int) -> Array:
        return np.arange(self.first[index], self.first[index + 1])

    def _join(self, index: int, step: Op) -> None:
        """Tie the channels of operator `index` to those of its inputs, or fix their scale at 1."""
        mine, sources = self.of(index), [self.of(i) for i in step.inputs]
        proportional = step.activation in _PROPORTIONAL or is_leaky(step.activation)
        if not proportional or step.kind == "linear":
            self.pinned[mine] = True
        if step.kind in ("conv", "linear", "affine", "input"):  # a residual is added unscaled
            joined = [(mine, s) for s in sources[1:]]
        elif step.kind in ("max_pool", "avg_pool", "upsample", "global_mean", "add", "sub"):
            joined = [(mine, s) for s in sources]
        elif step.kind == "mul":
            self.pinned[sources[1]] = True
            joined = [(mine, sources[0])]
        elif step.kind == "concat":
            joined = [(mine, np.concatenate(sources))]
        elif step.kind == "slice":
            start = step.options["first"]
            joined = [(mine, sources[0][start : start + len(mine)])]
        elif step.kind == "gather_channels":
            joined = [(mine, sources[0][list(step.options["channels"])])]
        elif step.kind == "depth_to_space":
            joined = [(np.tile(mine, len(sources[0]) // len(mine)), sources[0])]
        elif step.kind in ("flatten", "identity") and sources[0].size and mine.size % sources[0].size == 0:
            joined = [(mine, np.repeat(sources[0], mine.size // sources[0].size))]
        else:
            self.pinned[np.concatenate([mine, *sources])] = True
            joined = []
        # Channels whose numbers differ (a broadcast) cannot be tied one to one.
        for a, b in joined:
            if a.shape == b.shape:
                self.tied_channels.append((a, b))
            else:
                self.pinned[a] = self.pinned[b] = True

    def smallest_of_tied(self, numbers: Array) -> Array:
        """Replace each channel's value by the smallest among the channels that are tied to it, directly or indirectly.

        `numbers` has one value per channel.
        """
        if self.tied_channels:
            # Propagate minima along the ties until nothing changes.
            a, b = (np.concatenate(side) for side in zip(*self.tied_channels, strict=True))
            while True:
                before, least = numbers, np.minimum(numbers[a], numbers[b])
                numbers = numbers.copy()
                np.minimum.at(numbers, a, least)
                np.minimum.at(numbers, b, least)
                if np.array_equal(before, numbers):
                    break
        return numbers


def equalization_scales(
    graph: FloatGraph, calibration: Calibration, parameters: list[AffineParameters], float_reasons: Collection[str]
) -> EqualizationScales:
    """Compute the equalization scale (at least 1) of every channel of every result.

    Operators named in `float_reasons`, which stay in float, are not scaled.
    """
    channels = _TiedChannels(graph, calibration.shapes)
    margin = np.full(channels.pinned.shape, _MAX_SCALE)
    for index, p in enumerate(parameters):
        limits, mine = np.array(calibration.channel_ranges[index]), channels.of(index)
        if len(limits) != len(mine) or graph.steps[index].name in float_reasons:
            channels.pinned[mine] = True
            continue
        # The scale at which the channel's own range just fills the activation's range.
        low, high = -p.zero_point * p.scale, (255 - p.zero_point) * p.scale
        if graph.steps[index].activation == "relu6":  # clamps at 6 also where a tied range reaches further
            high = min(high, 6.0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            up = np.where(limits[:, 1] > 0, high / limits[:, 1], np.inf)
            down = np.where(limits[:, 0] < 0, low / limits[:, 0], np.inf)
        margin[mine] = np.clip(np.minimum(up, down), 1.0, _MAX_SCALE)
    margin[channels.pinned] = 1.0
    scales = channels.smallest_of_tied(margin)
    return [scales[channels.of(i)] for i in range(len(graph.steps))]


def equalize(graph: FloatGraph, by: EqualizationScales) -> None:
    """Multiply the weights and biases of a graph in place by equalization scales; its function is unchanged."""
    for index, step in enumerate(graph.steps):
        if step.kind not in ("conv", "linear", "affine"):
            continue
        source_scale, result_scale = by[step.inputs[0]], by[index]
        if step.kind == "affine":
            weight = np.ones(len(result_scale), np.float32) if step.weight is None else step.weight
            step.weight = (weight * result_scale / source_scale).astype(np.float32)
        elif step.weight is not None:
            step.weight = _equalized_weights(step, source_scale, result_scale)
        if step.bias is not None:
            step.bias = (step.bias * result_scale).astype(np.float32)


def _equalized_weights(step: Op, source_scale: Array, result_scale: Array) -> Array:
    """Scale weights (O, C / groups, ...) for equalized channels: multiply by `result_scale`, divide by `source_scale`.

    The first has one entry per output channel, the second one per input channel.
    """
    assert step.weight is not None
    kernel_axes = (1,) * (step.weight.ndim - 2)
    outputs, inner = step.weight.shape[:2]
    groups = step.groups if step.kind == "conv" else 1
    columns = np.repeat(source_scale.reshape(groups, inner), outputs // groups, 0).reshape(outputs, inner, *kernel_axes)
    scaled: Array = (step.weight * result_scale.reshape(-1, 1, *kernel_axes) / columns).astype(np.float32)
    return scaled
