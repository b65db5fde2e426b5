"""Familiarity: tells whether a kernel is like those that a model was trained on.

A model extrapolates badly to kinds of kernels that it has never seen, and its scores do not show it. A kernel is
described by its operations, element types and log sizes. It is familiar if the nearest train kernel is
not much farther away than train kernels are from each other. Columns that never vary in the train split count too,
because a new kind of kernel differs in just those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import N_OPCODES, NODE_COLUMN
from tilewise.costmodel.features.ranker import kernel_sizes

Floats = npt.NDArray[np.float32]
_MAX_KERNELS = 1000  # described kernels, to bound the size of a model file
_MIN_DEVIATION = 0.5  # of a column: a doubled size, or an operation more, is never far away
_TOLERANCE = 1.5  # distance to the nearest train kernel, relative to the largest among train kernels
_TYPES = slice(NODE_COLUMN["shape_element_type_is_invalid_type"], NODE_COLUMN["shape_dimensions_0"])


@dataclass(frozen=True, eq=False)
class Familiarity:
    """Descriptions of train kernels, and the distance up to which a kernel counts as familiar."""

    kernels: Floats  # (K, D), scaled
    scale: Floats  # (D,)
    limit: float

    @classmethod
    def fit(cls, kernels: Sequence[Kernel]) -> Familiarity:
        """Describe a sample of the train kernels and measure their distances."""
        step = -(-len(kernels) // _MAX_KERNELS)
        table = np.stack([_description(kernel) for kernel in kernels[::step]])
        scale = (1 / np.maximum(table.std(axis=0), _MIN_DEVIATION)).astype(np.float32)
        table = table * scale
        # Distances to the nearest other kernel; equal descriptions count as one kernel.
        unique = np.unique(table, axis=0)
        nearest = (
            [np.partition(np.linalg.norm(unique - row, axis=1), 1)[1] for row in unique] if len(unique) > 1 else []
        )
        return cls(unique, scale, _TOLERANCE * float(max([1.0, *nearest])))

    def distance(self, kernel: Kernel) -> float:
        """Return the distance to the nearest train kernel; up to 1 is familiar."""
        gaps = np.linalg.norm(self.kernels - _description(kernel) * self.scale, axis=1)
        return float(gaps.min()) / self.limit

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"familiar.kernels": self.kernels, "familiar.scale": self.scale,
                "familiar.limit": np.array([self.limit], np.float32)}  # fmt: skip


def _description(kernel: Kernel) -> Floats:
    """Return which operations and types a kernel has, and the logarithms of its sizes."""
    present = np.zeros(N_OPCODES)
    present[kernel.node_opcode] = 1
    sizes = np.log2(np.maximum(kernel_sizes(kernel), 0) + 1)
    return np.concatenate([present, kernel.node_feat[:, _TYPES].max(axis=0), sizes]).astype(np.float32)
