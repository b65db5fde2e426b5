"""Baselines that a learned model must beat: random choice, the default configuration, and an analytical formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Split
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, TILE_FEATURES, Schema
from tilewise.costmodel.data.tpu_tiles import estimate_runtime
from tilewise.costmodel.features.occupancy import Gpu, element_bytes, is_product, occupancy_features
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.features.ranker_fit import gpu_of
from tilewise.costmodel.metrics import random_top_k_error

Errors = dict[str, npt.NDArray[np.float64]]
# The formulas' constants are rounded data-sheet values and estimates; they were not fitted to measurements.
# Per multiprocessor of a GPU: bf16 multiply-adds and bytes per cycle; memory latency and launch of a block in cycles.
_MACS_PER_CYCLE, _BYTES_PER_CYCLE, _LATENCY_CYCLES, _START_CYCLES = 1024.0, 48.0, 1600.0, 1000.0
_SPILL_ELEMENTS = 200.0  # accumulators of a thread beyond which registers spill
_VECTOR_LANES = 16.0  # float32 lanes of a CPU vector
_MIN_ACCUMULATORS = 12.0  # independent sums that keep a CPU's multipliers busy
_COPY_COST = 16.0  # cost of packing one element, in multiply-adds


def random_errors(kernels: Sequence[Kernel], ks: Sequence[int]) -> Errors:
    """Return a random order's expected top-k error (slowdown of the best of k): (kernels, ks)."""
    return {f"top{k}": np.array([random_top_k_error(kernel.target, k) for kernel in kernels]) for k in ks}


def default_errors(kernels: Sequence[Kernel], ks: Sequence[int]) -> Errors:
    """Return the error of the default configuration (slowdown against the fastest): (kernels, ks)."""
    errors = np.array([max(0.0, 1.0 / kernel.target.min() - 1.0) for kernel in kernels])
    return {f"top{k}": errors for k in ks}


class Analytical:
    """Analytical cost model: a formula from the sizes alone, as one would write it before having measurements.

    - GPU collections: the busy time of one multiprocessor, a roofline per loop step (the maximum of arithmetic, memory
      traffic and exposed latency) plus the start of each program.
    - CPU collections: padded multiply-adds at the rate that the register tile's shape allows, plus packing.
    - TPU collections: the estimate of `data.tpu_tiles`.
    """

    name = "analytical"
    calibration = None

    def __init__(self, split: Split) -> None:
        self.gpu = gpu_of(split.schema)
        self.cpu = _cpu_columns(split.schema)
        self.applicable = self.applies(split.schema)

    @staticmethod
    def applies(schema: Schema) -> bool:
        """Tell whether a collection's column names are those of a GPU, CPU or TPU that the formula knows."""
        return bool(gpu_of(schema) or _cpu_columns(schema) or schema.config_features == TILE_FEATURES)

    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]:
        """Return the log of each configuration's estimated cost, (C,); all 0 for unknown collections."""
        if not self.applicable:
            return np.zeros(kernel.n_configs, np.float32)
        if self.gpu is not None:
            cost = _gpu_cycles(self.gpu, kernel)
        elif self.cpu:
            cost = _cpu_work(self.cpu, kernel)
        else:
            cost = estimate_runtime(kernel.node_feat, kernel.node_opcode, kernel.edge_index, kernel.config_feat)
        return np.log(cost).astype(np.float32)


def _gpu_cycles(gpu: Gpu, kernel: Kernel) -> npt.NDArray[np.float64]:
    """Estimate, for each configuration, the cycles of the multiprocessor that has the most blocks to run: (C,)."""
    config = kernel.config_feat.astype(np.float64)
    features = 2.0 ** occupancy_features(gpu, kernel, kernel_sizes(kernel), config)
    programs, resident, per_thread, steps = features[[0, 4, 5, 6]]
    warps, stages = np.maximum(config[:, gpu.warps], 1), np.clip(config[:, gpu.stages], 1, 4)
    result, entry, other = config[:, 15], config[:, 23], config[:, 7]  # elements of the three tiles
    own_programs = np.ceil(programs / gpu.multiprocessors)
    concurrent = np.minimum(resident, own_programs)
    spill, size = np.maximum(1.0, per_thread / _SPILL_ELEMENTS) ** 2, element_bytes(kernel)
    if is_product(kernel):
        # Small tiles and few warps do not reach the peak rate of the tensor cores.
        narrow = (128 / np.clip(np.sqrt(result), 1, 128)) ** 0.6 * (8 / np.minimum(8, warps)) ** 0.3
        arithmetic = np.sqrt(np.maximum(result * entry * other, 1)) * size / 4 / _MACS_PER_CYCLE * spill * narrow
        traffic, latency = (entry + other) * size / _BYTES_PER_CYCLE, _LATENCY_CYCLES / (stages * concurrent)
    else:
        # Reductions: the arithmetic is one operation per element on 128 lanes.
        arithmetic, traffic = entry / 128 * spill, entry * size / _BYTES_PER_CYCLE
        latency = 4 * _LATENCY_CYCLES / np.minimum(8, warps * concurrent)
    step_cycles = np.maximum(np.maximum(arithmetic, traffic), latency)
    return np.asarray(own_programs * (_START_CYCLES / concurrent + steps * step_cycles))


_CPU_NAMES = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")


def _cpu_columns(schema: Schema) -> list[int]:
    """Return the positions of the columns that the CPU formula reads; empty for other collections."""
    names = schema.config_features
    return [names.index(name) for name in _CPU_NAMES] if set(_CPU_NAMES) <= set(names) else []


def _cpu_work(columns: list[int], kernel: Kernel) -> npt.NDArray[np.float64]:
    """Estimate each configuration's work per thread, (C,), in multiply-adds.

    Padding counts, small register tiles multiply at a lower rate, and packing is added.
    """
    # m, n and k of the product, from the shapes of the root and of the first operand.
    rows, cols, pack_a, pack_b, threads_m, threads_n = kernel.config_feat[:, columns].astype(np.float64).T
    sizes = kernel_sizes(kernel)
    root, first = sizes[:DIMENSIONS], sizes[2 * DIMENSIONS : 3 * DIMENSIONS]
    last = max(int((root > 0).sum()), 2)
    m, n, k = max(root[last - 2], 1.0), max(root[last - 1], 1.0), max(first[max(int((first > 0).sum()) - 1, 0)], 1.0)
    rows, cols = np.maximum(rows, 1), np.maximum(cols, 1)
    own_m, own_n = m / np.maximum(threads_m, 1), n / np.maximum(threads_n, 1)
    vectors = np.maximum(np.ceil(cols / _VECTOR_LANES), 1)
    padding = np.ceil(np.minimum(cols, own_n) / _VECTOR_LANES) * _VECTOR_LANES / np.minimum(cols, own_n)
    # Too few accumulators expose the latency of multiply-adds; thin tiles load more than they compute.
    rate = np.minimum(1.0, rows * vectors / _MIN_ACCUMULATORS) * np.minimum(1.0, 2.0 / (1 / rows + 1 / vectors) / 2.0)
    return np.asarray(own_m * own_n * k * padding / rate + _COPY_COST * (pack_a * own_m * k + pack_b * k * own_n))
