"""Preparation of the five published baselines: columns scaled to [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Split
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]
_BLOCK_ROWS = 1 << 18  # rows of a split that `extremes` holds in memory at once; arbitrary, insensitive


@dataclass(frozen=True, eq=False)
class MinMax:
    """Scaling of every column to [0, 1] by its extremes in the train split; constant columns are dropped."""

    kind: ClassVar[str] = "minmax"
    node_low: Floats
    node_high: Floats
    config_low: Floats
    config_high: Floats

    @classmethod
    def fit(cls, split: Split) -> MinMax:
        """Find minimum and maximum of every column of the train split."""
        if not len(split):
            raise ConfigurationError("The train split is empty, so feature ranges cannot be fitted to it.")
        return cls(*extremes(split.column("node_feat")), *extremes(split.column("config_feat")))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> MinMax:
        """Rebuild the scaling from the arrays of a model file."""
        # Only the presence of the ranges is checked here; widths are compared with each kernel.
        names = ("node_low", "node_high", "config_low", "config_high")
        if any(name not in tensors or tensors[name].ndim != 1 for name in names):
            raise FileFormatError(
                "The model file lacks the feature ranges of its min-max scaling; train or export it again."
            )
        return cls(*(np.asarray(tensors[name], dtype=np.float32) for name in names))

    @property
    def node_width(self) -> int:
        return int((self.node_high > self.node_low).sum())

    @property
    def config_width(self) -> int:
        return int((self.config_high > self.config_low).sum())

    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> ModelInputs:
        """Scale one kernel, with all configurations or those in `rows`."""
        config = kernel.config_feat if rows is None else kernel.config_feat[rows]
        return ModelInputs(
            _scale(kernel.node_feat, self.node_low, self.node_high),
            kernel.node_opcode.astype(np.int64),
            np.asarray(kernel.edge_index),
            _scale(config, self.config_low, self.config_high),
        )

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the ranges under the names that model files use."""
        return {
            "node_low": self.node_low,
            "node_high": self.node_high,
            "config_low": self.config_low,
            "config_high": self.config_high,
        }


def extremes(column: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return each column's minimum and maximum, computed by blocks of rows to bound memory use."""
    # A split may be a memory map that is larger than memory.
    blocks = [column[start : start + _BLOCK_ROWS] for start in range(0, len(column), _BLOCK_ROWS)]
    low = np.min([block.min(axis=0) for block in blocks], axis=0)
    high = np.max([block.max(axis=0) for block in blocks], axis=0)
    return low.astype(np.float32), high.astype(np.float32)


def _scale(values: npt.NDArray[Any], low: Floats, high: Floats) -> Floats:
    """Scale the columns that vary in the train split to [0, 1]; drop the others."""
    # A column that was constant in training has no range to scale by.
    varying = np.flatnonzero(high > low)
    if values.shape[1] != len(low):
        raise FileFormatError(f"The kernel has {values.shape[1]} feature columns; the model was trained on {len(low)}.")
    return np.asarray((values[:, varying] - low[varying]) / (high[varying] - low[varying]), dtype=np.float32)
