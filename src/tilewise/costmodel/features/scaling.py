"""Preparations: fitted transformations from a kernel's raw features to the inputs of a model.

A preparation is fitted to the train split, is stored in the model file together with the weights, and is plain NumPy,
so that training, prediction and the torch-free scorer read exactly the same inputs. The five baselines use `MinMax`;
TileRanker uses `features.ranker`, the CPU's ridge model `features.cpu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.shards import Split
from tilewise.costmodel.features.neighbours import Neighbours
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]
_BLOCK_ROWS = 1 << 18  # rows of a split that `extremes` holds in memory at once; arbitrary, insensitive


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs of a model for one kernel and all or some of its configurations."""

    node: Floats  # (n, F)
    opcode: npt.NDArray[np.int64]  # (n,)
    edges: npt.NDArray[np.int32]  # (m, 2)
    config: Floats  # (c, D)
    parent: ModelInputs | None = None  # the inputs that these were selected from; it caches what depends on the graph

    @cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours.from_edges(self.edges, len(self.node)) if self.parent is None else self.parent.neighbours

    def with_config(self, config: Floats) -> ModelInputs:
        """Return inputs of the same kernel with other configurations."""
        return ModelInputs(self.node, self.opcode, self.edges, config, self.parent or self)


class Preparation(Protocol):
    """A fitted transformation; `train` fits one, and a model file stores it."""

    kind: ClassVar[str]

    @property
    def node_width(self) -> int: ...
    @property
    def config_width(self) -> int: ...
    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> ModelInputs: ...
    def tensors(self) -> dict[str, npt.NDArray[Any]]: ...
    def settings(self) -> dict[str, Any]: ...


def check_configs_differ(preparation: Preparation) -> None:
    """Raise an error if all configurations of a kernel have the same inputs, so that nothing can be ranked."""
    # Kernel-wide columns are equal in all configurations of a kernel.
    if preparation.config_width <= getattr(preparation, "global_width", 0):
        raise ConfigurationError(
            "All configurations of the train split are equal, so there is nothing to rank; measure different ones."
        )


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
        if not len(split):
            raise ConfigurationError("The train split is empty, so feature ranges cannot be fitted to it.")
        return cls(*extremes(split.column("node_feat")), *extremes(split.column("config_feat")))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]) -> MinMax:
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
        return {
            "node_low": self.node_low,
            "node_high": self.node_high,
            "config_low": self.config_low,
            "config_high": self.config_high,
        }

    def settings(self) -> dict[str, Any]:
        return {}


def extremes(column: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the minimum and maximum of each column, reading a block of rows at a time to bound memory use."""
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


def preparation_kinds() -> dict[str, Any]:
    """Return the preparation classes by the name that a model file stores."""
    # Imported here because both modules import this one.
    from tilewise.costmodel.features.cpu import CpuFeatures
    from tilewise.costmodel.features.ranker import RankerFeatures

    return {MinMax.kind: MinMax, RankerFeatures.kind: RankerFeatures, CpuFeatures.kind: CpuFeatures}
