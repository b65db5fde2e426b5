"""What a learned model must beat: chance, the default configuration, and a formula that knows only the sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.kernel import Kernel
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.rankerfeatures import RankerFeatures, kernel_sizes
from tilewise.costmodel.shards import Split

Errors = dict[str, npt.NDArray[np.float64]]
_DRAWS = 20
_TILE_OVERHEAD = 2.0**12  # elements of work that starting one tile is worth
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
    """A closed form over tile counts and padding: padded work, plus a cost per tile, plus a penalty for huge tiles.

    It sets each configuration column against the one size it cuts most often without remainder, so it needs no name and
    no measurement; it is what one writes down before having data.
    """

    name = "analytical"
    calibration = None

    def __init__(self, split: Split) -> None:
        self.features = RankerFeatures.fit(split)
        self.pairs = _best_slot_per_column(self.features, split)

    def score(self, kernel: Kernel) -> npt.NDArray[np.float32]:
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
