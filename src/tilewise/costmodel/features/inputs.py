"""Inputs of a model, and the interface of a preparation: a fitted transformation from a kernel's raw features to them.

A preparation is fitted to the train split, is stored in the model file together with the weights, and is plain NumPy,
so that training, prediction and the torch-free scorer read exactly the same inputs. The five baselines use
`scaling.MinMax`; TileRanker uses `ranker.RankerFeatures`, the CPU's ridge model `cpu.CpuFeatures`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel

Floats = npt.NDArray[np.float32]
# Imported by name: a model reads one kind of inputs and needs no code of the others.
_PREPARATIONS = {"minmax": "scaling:MinMax", "ranker": "ranker:RankerFeatures", "cpu": "cpu:CpuFeatures"}


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs of a model for one kernel and all or some of its configurations."""

    node: Floats  # (n, F)
    opcode: npt.NDArray[np.int64]  # (n,)
    edges: npt.NDArray[np.int32]  # (m, 2)
    config: Floats  # (c, D)

    def with_config(self, config: Floats) -> ModelInputs:
        """Return inputs of the same kernel with other configurations."""
        return ModelInputs(self.node, self.opcode, self.edges, config)


class Preparation(Protocol):
    """A fitted transformation; `train` fits one, and a model file stores it."""

    kind: ClassVar[str]

    @property
    def node_width(self) -> int: ...
    @property
    def config_width(self) -> int: ...
    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> ModelInputs: ...
    def tensors(self) -> dict[str, npt.NDArray[Any]]: ...


def preparation_class(kind: Any) -> Any:
    """Return the class of feature preparation with this `kind`, or None if there is none."""
    if not isinstance(kind, str) or kind not in _PREPARATIONS:
        return None
    module, name = _PREPARATIONS[kind].split(":")
    return getattr(importlib.import_module(f"tilewise.costmodel.features.{module}"), name)
