"""What a learned model must beat: chance, the default configuration, and a formula that knows only the sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, TILE_FEATURES, Schema
from tilewise.costmodel.data.shards import Split
from tilewise.costmodel.features.occupancy import Gpu, element_bytes, is_product, occupancy_features
from tilewise.costmodel.features.ranker import RankerFeatures, kernel_sizes
from tilewise.costmodel.metrics import top_k_error

Errors = dict[str, npt.NDArray[np.float64]]
_DRAWS = 20
_TILE_OVERHEAD = 2.0**12  # elements of work that starting one tile is worth
_MACS_PER_CYCLE, _BYTES_PER_CYCLE, _LATENCY, _START = 1024.0, 48.0, 1600.0, 1000.0  # of a GPU's multiprocessor
_VECTOR, _ACCUMULATORS = 16.0, 12.0  # lanes of a vector; independent sums that keep a CPU's multipliers busy
_LOCAL_ELEMENTS = 2.0**16  # elements of a tile beyond which it is taken to spill from fast memory


def random_errors(kernels: Sequence[Kernel], ks: Sequence[int], seed: int = 0) -> Errors:
    """Mean top-k error of random orders, kernel by kernel."""
    rng = np.random.default_rng(seed)
    rows = [
        [np.mean([top_k_error(kernel.target, rng.random(kernel.n_configs), k) for _ in range(_DRAWS)]) for k in ks]
        for kernel in kernels
    ]
    return {f"top{k}": np.array([row[i] for row in rows]) for i, k in enumerate(ks)}


def default_errors(kernels: Sequence[Kernel], ks: Sequence[int]) -> Errors:
    """The default configuration runs in one normalizer, so its error is one over the best target, less one."""
    errors = np.array([max(0.0, 1.0 / kernel.target.min() - 1.0) for kernel in kernels])
    return {f"top{k}": errors for k in ks}


class Analytical:
    """A closed form that knows sizes and no measurement: what one writes down before having data.

    For a GPU whose columns are known by name: how long one multiprocessor is busy with its share of the programs, each
    a start and a number of loop steps that take the longest of arithmetic, traffic and what latency is not hidden. For
    a CPU likewise: padded multiply-adds, at the rate that a register tile of that shape allows, and what packing
    copies. Elsewhere: padded work, plus a cost per tile, plus a penalty for huge tiles; each configuration column is
    set against the one size it cuts most often without remainder. Without names that is a guess, so evaluations leave
    it out (`applies`).
    """

    name = "analytical"
    calibration = None

    def __init__(self, split: Split) -> None:
        self.gpu = Gpu.from_schema(split.schema)
        self.cpu = _cpu_columns(split.schema)
        known = self.gpu or self.cpu
        self.pairs = [] if known else _best_slot_per_column(RankerFeatures.fit(split), split)

    @staticmethod
    def applies(schema: Schema) -> bool:
        """Whether what the columns mean is known from their names."""
        return bool(Gpu.from_schema(schema) or _cpu_columns(schema) or schema.config_features == TILE_FEATURES)

    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]:
        if self.gpu is not None:
            return np.log(_gpu_cycles(self.gpu, kernel)).astype(np.float32)
        if self.cpu:
            return np.log(_cpu_work(self.cpu, kernel)).astype(np.float32)
        sizes = np.maximum(kernel_sizes(kernel), 1.0)
        padded, tiles, volume = 0.0, 0.0, 0.0
        for column, slot in self.pairs:
            tile = np.maximum(np.abs(kernel.config_feat[:, column].astype(np.float64)), 1.0)
            count = np.ceil(sizes[slot] / tile)
            padded = padded + np.log2(count * tile)
            tiles = tiles + np.log2(count)
            volume = volume + np.log2(np.minimum(tile, sizes[slot]))
        work = np.exp2(np.minimum(padded, 60)) + _TILE_OVERHEAD * np.exp2(np.minimum(tiles, 48))
        spill = np.maximum(0.0, volume - np.log2(_LOCAL_ELEMENTS))
        return np.broadcast_to(np.log2(work) + spill, kernel.n_configs).astype(np.float32)


def _gpu_cycles(gpu: Gpu, kernel: Kernel) -> npt.NDArray[np.float64]:
    """About how many cycles the busiest multiprocessor takes for each configuration."""
    config = kernel.config_feat.astype(np.float64)
    filling = 2.0 ** occupancy_features(gpu, kernel, kernel_sizes(kernel), config)
    programs, resident, a_thread, steps = filling[:, 0], filling[:, 4], filling[:, 5], filling[:, 6]
    warps, stages = np.maximum(config[:, gpu.warps], 1), np.clip(config[:, gpu.stages], 1, 4)
    result, entry, other = config[:, 15], config[:, 23], config[:, 7]  # elements of the three tiles
    own = np.ceil(programs / gpu.multiprocessors)
    together, spill, size = np.minimum(resident, own), np.maximum(1.0, a_thread / 200) ** 2, element_bytes(kernel)
    if is_product(kernel):
        narrow = (128 / np.clip(np.sqrt(result), 1, 128)) ** 0.6 * (8 / np.minimum(8, warps)) ** 0.3
        arithmetic = np.sqrt(np.maximum(result * entry * other, 1)) * size / 4 / _MACS_PER_CYCLE * spill * narrow
        traffic, latency = (entry + other) * size / _BYTES_PER_CYCLE, _LATENCY / (stages * together)
    else:
        arithmetic, traffic = entry / 128 * spill, entry * size / _BYTES_PER_CYCLE
        latency = 4 * _LATENCY / np.minimum(8, warps * together)
    a_step = np.maximum(np.maximum(arithmetic, traffic), latency)
    return np.asarray(own * (_START / together + steps * a_step))


_CPU_NAMES = ("register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n")


def _cpu_columns(schema: Schema) -> list[int]:
    names = schema.config_features
    return [names.index(name) for name in _CPU_NAMES] if set(_CPU_NAMES) <= set(names) else []


def _cpu_work(columns: list[int], kernel: Kernel) -> npt.NDArray[np.float64]:
    """Multiply-adds of one thread, dearer where the register tile is small, and elements copied by packing."""
    rows, cols, pack_a, pack_b, threads_m, threads_n = kernel.config_feat[:, columns].astype(np.float64).T
    sizes = kernel_sizes(kernel)
    root, first = sizes[:DIMENSIONS], sizes[2 * DIMENSIONS : 3 * DIMENSIONS]
    last = max(int((root > 0).sum()), 2)
    m, n, k = max(root[last - 2], 1.0), max(root[last - 1], 1.0), max(first[max(int((first > 0).sum()) - 1, 0)], 1.0)
    rows, cols = np.maximum(rows, 1), np.maximum(cols, 1)
    own_m, own_n = m / np.maximum(threads_m, 1), n / np.maximum(threads_n, 1)
    vectors = np.maximum(np.ceil(cols / _VECTOR), 1)
    masked = np.ceil(np.minimum(cols, own_n) / _VECTOR) * _VECTOR / np.minimum(cols, own_n)
    rate = np.minimum(1.0, rows * vectors / _ACCUMULATORS) * np.minimum(1.0, 2.0 / (1 / rows + 1 / vectors) / 2.0)
    return np.asarray(own_m * own_n * k * masked / rate + 16 * (pack_a * own_m * k + pack_b * k * own_n))


def _best_slot_per_column(features: RankerFeatures, split: Split) -> list[tuple[int, int]]:
    kernels = split[:50]
    chosen = []
    for column in np.unique(features.pairs[:, 0]):
        slots = features.pairs[features.pairs[:, 0] == column][:, 1]
        fit = [np.mean([_divides(kernel, int(column), int(slot)) for kernel in kernels]) for slot in slots]
        chosen.append((int(column), int(slots[int(np.argmax(fit))])))
    return chosen


def _divides(kernel: Kernel, column: int, slot: int) -> float:
    size, tile = max(kernel_sizes(kernel)[slot], 1.0), np.maximum(np.abs(kernel.config_feat[:, column]), 1.0)
    return float(np.mean((tile <= size) & (np.mod(size, tile) == 0)))
