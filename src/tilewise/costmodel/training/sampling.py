"""Sampling of training batches: kernels and configurations as a function of seed, epoch and data alone.

Every epoch has its own random generator, so a run that resumes at an epoch draws the same batches as an uninterrupted
run. Inputs are cached within a memory budget; beyond it they are computed for the sampled rows only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Split
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.inputs import ModelInputs, Preparation, preparation_class

CACHE_BYTES = 256 << 20  # holds every embedded collection; arbitrary


class InputCache:
    """Cache of the model inputs of a split's kernels, within a memory budget."""

    def __init__(self, kernels: Sequence[Kernel], preparation: Preparation, budget: int = CACHE_BYTES) -> None:
        """Start with an empty cache of at most `budget` bytes."""
        self.kernels, self.preparation = kernels, preparation
        self._inputs: dict[int, ModelInputs] = {}
        self._budget = self._kernel_budget = budget  # bytes left, for inputs and for kernels
        self._kernels: dict[int, Kernel] = {}

    def __len__(self) -> int:
        return len(self.kernels)

    def kernel(self, index: int) -> Kernel:
        """Return kernel `index` from the cache, or from the split.

        Cached kernels have plain arrays instead of views of a memory map, whose rows are selected twice as fast.
        """
        if index in self._kernels:
            return self._kernels[index]
        kernel = self.kernels[index]
        size = kernel.config_feat.nbytes + kernel.runtime.nbytes + kernel.normalizer.nbytes
        if size > self._kernel_budget:
            return kernel
        self._kernel_budget -= size
        rows: dict[str, Any] = {
            name: np.asarray(getattr(kernel, name)) for name in ("config_feat", "runtime", "normalizer")
        }
        self._kernels[index] = dataclasses.replace(kernel, **rows)
        return self._kernels[index]

    def inputs(self, index: int) -> ModelInputs:
        """Return the inputs of all configurations of a kernel."""
        if index in self._inputs:
            return self._inputs[index]
        return self._store(index, self.preparation.apply(self.kernel(index)))

    def rows(self, index: int, rows: npt.NDArray[np.int64]) -> ModelInputs:
        """Return the inputs of the configurations `rows` of kernel `index`."""
        if index not in self._inputs and not self._fits(self.kernel(index)):
            return self.preparation.apply(self.kernel(index), rows)
        inputs = self.inputs(index)
        return inputs.with_config(inputs.config[rows])

    def target(self, index: int, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        """Return the normalized runtimes of kernel `index`, of all configurations or `rows`."""
        kernel = self.kernel(index)
        target = kernel.target if rows is None else kernel.runtime[rows] / kernel.normalizer[rows]
        return np.asarray(target, dtype=np.float64)

    def _fits(self, kernel: Kernel) -> bool:
        """Tell whether the prepared inputs of a kernel fit the remaining memory budget."""
        return kernel.n_configs * self.preparation.config_width * 4 <= self._budget

    def _store(self, index: int, inputs: ModelInputs) -> ModelInputs:
        """Cache the inputs of kernel `index` if they fit the memory budget, and return them."""
        size = inputs.node.nbytes + inputs.config.nbytes + inputs.edges.nbytes + inputs.opcode.nbytes
        if size <= self._budget:
            self._budget -= size
            # Rows will be selected from it, so they must be contiguous.
            inputs = dataclasses.replace(inputs, config=np.ascontiguousarray(inputs.config))
            self._inputs[index] = inputs
        return inputs


def prepared_inputs(split: Split, kind: str) -> InputCache:
    """Return the input cache of a train split under a preparation of this `kind` that is fitted to it.

    All models that are trained on the split share the cache.
    """
    if kind not in split.prepared:
        split.prepared[kind] = InputCache(split, preparation_class(kind).fit(split))
    cache: InputCache = split.prepared[kind]
    return cache


def slate_positions(counts: Any, uniform: Any, fastest: float) -> Any:
    """Sample C configurations of each of K kernels, as positions (K, C) in their order by runtime.

    The share `fastest` of them are the fastest; the others are drawn one from each stratum of the rest. `counts` (K,)
    are the kernels' numbers of configurations and `uniform` (K, C) random numbers, both arrays or both tensors. A
    kernel with at most C configurations gets positions 0 to C - 1, of which those beyond its count are padding.
    """
    slots = uniform.shape[1]
    leaders = int(fastest * slots)
    slot = (uniform[:1] * 0).cumsum(1) + (uniform[:1] * 0 + 1).cumsum(1) - 1  # 0 to C - 1, of the type of `uniform`
    # Strata divide the slower configurations by rank into equal parts, so that no configuration is drawn twice.
    slower = counts[:, None] - leaders
    sampled_slots = leaders + (slot - leaders + uniform) * slower / (slots - leaders)
    direct = (slot < leaders) | (counts[:, None] <= slots)
    return _floor_to_int(slot * direct + sampled_slots * ~direct)


def _floor_to_int(x: Any) -> Any:
    """Round an array or tensor down to int64."""
    return x.astype(np.int64) if isinstance(x, np.ndarray) else x.long()


def epoch_batches(
    cache: InputCache, batch: int, configs: int, seed: int, epoch: int, fastest: float = 0.0
) -> Iterator[tuple[list[ModelInputs], list[npt.NDArray[np.float64]]]]:
    """Yield batches (inputs, targets) of `batch` kernels in random order, each with up to `configs` configurations.

    The share `fastest` of these are the kernel's fastest, the others random.
    """
    # One generator per epoch, so that resuming needs no generator state.
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(cache))
    for start in range(0, len(order), batch):
        inputs, targets = [], []
        for index in order[start : start + batch].tolist():
            count = cache.kernel(index).n_configs
            if fastest and count > configs:
                positions = slate_positions(np.array([count]), rng.random((1, configs)), fastest)[0]
                rows = np.argsort(cache.target(index), kind="stable")[positions]
            else:
                rows = rng.choice(count, min(configs, count), replace=False)
            inputs.append(cache.rows(index, rows))
            targets.append(cache.target(index, rows))
        yield inputs, targets
