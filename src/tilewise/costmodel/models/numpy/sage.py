"""EarlyJoinSAGE by the compiled kernels: every GraphSAGE layer and the sum over nodes in one call.

A graph's pairs of node and configuration go through all layers while they are in the cache. The first layer is linear
before its activation, so it is handed in as two products, one over nodes and one over configurations; and a node's
opcode goes through its part of that layer once per opcode. Without the extension, or for another activation than leaky
ReLU, the torch and NumPy models do the same arithmetic themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.costmodel.features.neighbours import Neighbours

Floats = npt.NDArray[Any]  # float32
Layer = tuple[Floats, Floats]  # kernel, bias

LEAKY_SLOPE = np.float32(0.2)
_kernels: Any = native  # `available` says whether they are there


@dataclass(frozen=True, eq=False)
class Weights:
    """The network's weights in the form the kernels want."""

    table: Floats  # (opcodes, E)
    wide: Floats  # (F + E + D, 2H): the first kernel's two halves side by side, for neighbours and for itself
    first_bias: Floats
    later: tuple[list[Floats], list[Floats]]  # kernels and biases of the layers after the first
    head: list[Layer]

    @classmethod
    def of(cls, arrays: Sequence[Floats], depth: int) -> Weights:
        """From the opcode table, then kernel and bias of `depth` GraphSAGE layers, then those of the head."""
        first, width = arrays[1], arrays[1].shape[1]
        wide = np.ascontiguousarray(first.reshape(2, -1, width).transpose(1, 0, 2)).reshape(-1, 2 * width)
        later = arrays[3 : 1 + 2 * depth]
        rest = arrays[1 + 2 * depth :]
        head = list(zip(rest[::2], rest[1::2], strict=True))
        return cls(arrays[0], wide, arrays[2], (list(later[::2]), list(later[1::2])), head)


def available(hidden_activation: str) -> bool:
    """Whether the compiled kernels can do this network's layers."""
    return native is not None and hidden_activation == "leaky_relu"


def halves(weights: Weights, features: Floats, opcode: npt.NDArray[np.int64], configs: Floats) -> tuple[Floats, Floats]:
    """Layer one before it is summed: (N, 2H) of the nodes, (K, C, 2H) of the configurations (K, C, D)."""
    start, end = features.shape[1], features.shape[1] + weights.table.shape[1]
    nodes = _kernels.matmul(features, weights.wide[:start])
    nodes += _kernels.matmul(weights.table, weights.wide[start:end])[opcode]
    flat = _kernels.matmul(configs.reshape(-1, configs.shape[-1]), weights.wide[end:])
    return nodes, flat.reshape(*configs.shape[:-1], -1)


def head_values(weights: Weights, x: Floats) -> list[Floats]:
    """The inputs of the head's layers, and last its result (rows, 1)."""
    values = [x]
    for number, (kernel, bias) in enumerate(weights.head):
        y = _kernels.matmul(values[-1], kernel, bias=bias)
        if number + 1 < len(weights.head):
            np.maximum(y, LEAKY_SLOPE * y, out=y)
        values.append(y)
    return values


def scores(
    weights: Weights, features: Floats, opcode: npt.NDArray[np.int64], configs: Floats, graph: Neighbours
) -> Floats:
    """(C,): one kernel's configurations (C, D)."""
    nodes, slots = halves(weights, features, opcode, configs[None])
    pooled = _kernels.sage_forward(nodes, slots, weights.first_bias, *weights.later, *graph.tables, False)
    return head_values(weights, pooled[0])[-1][:, 0]
