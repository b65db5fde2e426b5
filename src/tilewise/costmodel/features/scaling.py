"""From a kernel's raw numbers to what a model reads: a fitted transformation of node and configuration features.

A preparation is fitted on the train split, travels with the weights in one file, and is plain NumPy, so training,
prediction and the torch-free scorer all read exactly the same inputs. `MinMax` is what the five baselines use; the
ranker's own is in `features.ranker`.
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
_ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, eq=False)
class Prepared:
    """One kernel as a model reads it, with all or some of its configurations."""

    node: Floats  # (n, F)
    opcode: npt.NDArray[np.int64]  # (n,)
    edges: npt.NDArray[np.int32]  # (m, 2)
    config: Floats  # (c, D)
    origin: Prepared | None = None  # of which these are some of the configurations: what its graph says is kept there

    @cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours.of_one(self.edges, len(self.node)) if self.origin is None else self.origin.neighbours

    def with_config(self, config: Floats) -> Prepared:
        """The same kernel with other configurations."""
        return Prepared(self.node, self.opcode, self.edges, config, self.origin or self)


class Preparation(Protocol):
    """What `train` fits and a saved model carries."""

    kind: ClassVar[str]

    @property
    def node_width(self) -> int: ...
    @property
    def config_width(self) -> int: ...
    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> Prepared: ...
    def tensors(self) -> dict[str, npt.NDArray[Any]]: ...
    def settings(self) -> dict[str, Any]: ...


def check_configs_differ(preparation: Preparation) -> None:
    """What is the same for all configurations of a kernel ranks none of them."""
    if preparation.config_width <= getattr(preparation, "global_width", 0):
        raise ConfigurationError("All configurations of train have the same columns: there is nothing to rank by.")


@dataclass(frozen=True, eq=False)
class MinMax:
    """Columns scaled to [0, 1] by the extremes of the train files; columns constant there are dropped."""

    kind: ClassVar[str] = "minmax"
    node_low: Floats
    node_high: Floats
    config_low: Floats
    config_high: Floats

    @classmethod
    def fit(cls, split: Split) -> MinMax:
        if not len(split):
            raise ConfigurationError("The train split is empty, so feature ranges cannot be taken from it.")
        return cls(*extremes(split.column("node_feat")), *extremes(split.column("config_feat")))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]) -> MinMax:
        names = ("node_low", "node_high", "config_low", "config_high")
        if any(name not in tensors or tensors[name].ndim != 1 for name in names):
            raise FileFormatError("The model file lacks the feature ranges of its min-max scaling.")
        return cls(*(np.asarray(tensors[name], dtype=np.float32) for name in names))

    @property
    def node_width(self) -> int:
        return int((self.node_high > self.node_low).sum())

    @property
    def config_width(self) -> int:
        return int((self.config_high > self.config_low).sum())

    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> Prepared:
        config = kernel.config_feat if rows is None else kernel.config_feat[rows]
        return Prepared(
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
    """Smallest and largest of each column, a block of rows at a time so that little of the split is resident."""
    blocks = [column[start : start + _ROWS_AT_ONCE] for start in range(0, len(column), _ROWS_AT_ONCE)]
    low = np.min([block.min(axis=0) for block in blocks], axis=0)
    high = np.max([block.max(axis=0) for block in blocks], axis=0)
    return low.astype(np.float32), high.astype(np.float32)


def _scale(values: npt.NDArray[Any], low: Floats, high: Floats) -> Floats:
    kept = np.flatnonzero(high > low)
    if values.shape[1] != len(low):
        raise FileFormatError(f"The kernel has {values.shape[1]} feature columns; the model was trained on {len(low)}.")
    return np.asarray((values[:, kept] - low[kept]) / (high[kept] - low[kept]), dtype=np.float32)


def preparation_kinds() -> dict[str, Any]:
    """Name to class, for restoring a saved model."""
    from tilewise.costmodel.features.cpu import CpuFeatures
    from tilewise.costmodel.features.ranker import RankerFeatures

    return {MinMax.kind: MinMax, RankerFeatures.kind: RankerFeatures, CpuFeatures.kind: CpuFeatures}
