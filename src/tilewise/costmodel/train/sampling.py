"""Which kernels and configurations one step of training sees: a function of seed, epoch and data alone.

Every epoch draws from its own generator, so a run that resumes at an epoch sees what the uninterrupted run saw.
Features are kept once computed while they fit a fixed budget; beyond it they are computed for the sampled rows only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.scaling import ModelInputs, Preparation

CACHE_BYTES = 256 << 20


class Features:
    """ModelInputs kernels of one split, remembered while they are small."""

    def __init__(self, kernels: Sequence[Kernel], preparation: Preparation, budget: int = CACHE_BYTES) -> None:
        self.kernels, self.preparation = kernels, preparation
        self._kept: dict[int, ModelInputs] = {}
        self._left = budget
        self._found: dict[int, Kernel] = {}

    def __len__(self) -> int:
        return len(self.kernels)

    def kernel(self, index: int) -> Kernel:
        """One of the kernels; it is a handful of views, and making them takes longer than keeping them.

        Views of a memory map are kept as plain arrays: choosing rows of those takes half as long.
        """
        found = self._found.get(index)
        if found is None:
            kernel = self.kernels[index]
            rows: dict[str, Any] = {
                name: np.asarray(getattr(kernel, name)) for name in ("config_feat", "runtime", "normalizer")
            }
            found = self._found[index] = dataclasses.replace(kernel, **rows)
        return found

    def whole(self, index: int) -> ModelInputs:
        if index in self._kept:
            return self._kept[index]
        return self._keep(index, self.preparation.apply(self.kernel(index)))

    def rows(self, index: int, rows: npt.NDArray[np.int64]) -> ModelInputs:
        if index not in self._kept and not self._fits(self.kernel(index)):
            return self.preparation.apply(self.kernel(index), rows)
        full = self.whole(index)
        return full.with_config(full.config[rows])

    def target(self, index: int, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        kernel = self.kernel(index)
        target = kernel.target if rows is None else kernel.runtime[rows] / kernel.normalizer[rows]
        return np.asarray(target, dtype=np.float64)

    def _fits(self, kernel: Kernel) -> bool:
        return kernel.n_configs * self.preparation.config_width * 4 <= self._left

    def _keep(self, index: int, part: ModelInputs) -> ModelInputs:
        size = part.node.nbytes + part.config.nbytes + part.edges.nbytes + part.opcode.nbytes
        if size <= self._left:
            self._left -= size
            # Rows are what will be drawn from it.
            part = dataclasses.replace(part, config=np.ascontiguousarray(part.config))
            self._kept[index] = part
        return part


def epoch_batches(
    features: Features, batch: int, configs: int, seed: int, epoch: int
) -> Iterator[tuple[list[ModelInputs], list[npt.NDArray[np.float64]]]]:
    """Batches of kernels in a random order, each kernel with up to `configs` random configurations."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(features))
    for start in range(0, len(order), batch):
        parts, targets = [], []
        for index in order[start : start + batch].tolist():
            count = features.kernel(index).n_configs
            rows = rng.choice(count, min(configs, count), replace=False)
            parts.append(features.rows(index, rows))
            targets.append(features.target(index, rows))
        yield parts, targets
