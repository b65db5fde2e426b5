"""EarlyJoinSAGE by compiled kernels: all GraphSAGE layers and the sum over nodes in one call.

The kernels take a graph's (node, configuration) pairs through all layers while they are in the cache. Before its
activation the first layer is linear, so it is passed as two products, one over nodes and one over configurations; the
opcode embedding is multiplied once per opcode instead of once per node. Without the extension, or with another
activation than leaky ReLU, the torch and NumPy models compute the same themselves.
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

LEAKY_SLOPE = np.float32(0.2)  # of the published baseline
_kernels: Any = native  # callers ask `available` first


@dataclass(frozen=True, eq=False)
class SageWeights:
    """The network's weights in the layout of the compiled kernels."""

    table: Floats  # (opcodes, E)
    first_kernel: Floats  # (F + E + D, 2H): for the sum over neighbours and for the node itself, side by side
    first_bias: Floats  # (H,)
    later: tuple[list[Floats], list[Floats]]  # kernels and biases of the layers after the first
    head: list[Layer]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Floats], depth: int) -> SageWeights:
        """Build from the opcode table, kernel and bias of `depth` GraphSAGE layers, then those of the head."""
        first, width = arrays[1], arrays[1].shape[1]
        # The published layer stacks both halves along its inputs; side by side, one product computes both.
        first_kernel = np.ascontiguousarray(first.reshape(2, -1, width).transpose(1, 0, 2)).reshape(-1, 2 * width)
        later = arrays[3 : 1 + 2 * depth]
        head_arrays = arrays[1 + 2 * depth :]
        head = list(zip(head_arrays[::2], head_arrays[1::2], strict=True))
        return cls(arrays[0], first_kernel, arrays[2], (list(later[::2]), list(later[1::2])), head)


def available(hidden_activation: str) -> bool:
    """Tell whether the compiled kernels support a network with this activation."""
    return native is not None and hidden_activation == "leaky_relu"


def first_products(
    weights: SageWeights, features: Floats, opcode: npt.NDArray[np.int64], configs: Floats
) -> tuple[Floats, Floats]:
    """Multiply nodes and configurations (K, C, D) with the first layer: (N, 2H) and (K, C, 2H)."""
    start, end = features.shape[1], features.shape[1] + weights.table.shape[1]
    nodes = _kernels.matmul(features, weights.first_kernel[:start])
    # There are far fewer opcodes than nodes: multiply the table once and look rows up.
    nodes += _kernels.matmul(weights.table, weights.first_kernel[start:end])[opcode]
    flat = _kernels.matmul(configs.reshape(-1, configs.shape[-1]), weights.first_kernel[end:])
    return nodes, flat.reshape(*configs.shape[:-1], -1)


def head_values(weights: SageWeights, x: Floats) -> list[Floats]:
    """Return the inputs of the head's layers and, last, its result (rows, 1)."""
    values = [x]
    for number, (kernel, bias) in enumerate(weights.head):
        y = _kernels.matmul(values[-1], kernel, bias=bias)
        if number + 1 < len(weights.head):
            np.maximum(y, LEAKY_SLOPE * y, out=y)
        values.append(y)
    return values


def scores(
    weights: SageWeights, features: Floats, opcode: npt.NDArray[np.int64], configs: Floats, graph: Neighbours
) -> Floats:
    """Score one kernel's configurations (C, D); returns (C,)."""
    nodes, slots = first_products(weights, features, opcode, configs[None])
    pooled = _kernels.sage_forward(nodes, slots, weights.first_bias, *weights.later, *graph.tables, False)
    return head_values(weights, pooled[0])[-1][:, 0]
