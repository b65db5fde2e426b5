"""Rows that share cache sets: counted right, found in data where they slow, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.simulated import simulated_kernels
from tilewise.costmodel.data.dataset import dataset_from_kernels, load_dataset
from tilewise.costmodel.features.cache_conflicts import (
    NO_CONFLICTS,
    ConflictSamples,
    fit_cache_conflicts,
    has_conflicts,
    outer_dimensions,
)
from tilewise.costmodel.features.ranker import RankerFeatures, kernel_sizes

COLUMN, ROWS_OF_FIRST = 0, 5  # the first operand's last but one dimension


def sizes(first: tuple[int, ...], second: tuple[int, ...] = (), root: tuple[int, ...] = ()) -> np.ndarray:
    """The slots of `kernel_sizes`."""
    found = np.zeros(28)
    for slot, shape in ((0, root), (2, first), (3, second)):
        found[6 * slot : 6 * slot + len(shape)] = shape
    return found


@pytest.mark.parametrize(
    ("shape", "element", "apart", "rows"),
    [
        ((64, 1024), 4, 1, 64),  # 4,096 bytes: every row falls on the first
        ((64, 512), 4, 2, 64),
        ((64, 1000), 4, 128, 64),  # 4,000 is 32 times an odd number
        ((64, 1024), 1, 4, 64),
        ((12, 32, 768), 4, 4, 32),  # a matrix of a batch is like a matrix
        ((64, 8), 4, 1e9, 64),  # several rows in a cache line
    ],
)
def test_rows_fall_on_each_other_as_their_length_says(shape, element, apart, rows):
    outer = outer_dimensions(sizes(shape), element)
    assert outer[:2, ROWS_OF_FIRST].tolist() == [apart, rows]
    assert outer[2, ROWS_OF_FIRST] == shape[-1] * element


def test_a_plane_of_an_image_is_a_row_too():
    outer = outer_dimensions(sizes((1, 32, 16, 16)), 4)
    assert outer[:, ROWS_OF_FIRST + 1].tolist() == [4.0, 32.0, 1024.0]  # channels, planes of 1,024 bytes


def test_a_tile_conflicts_if_it_has_more_rows_than_ways_and_the_flag_matches():
    table = np.array([[0, ROWS_OF_FIRST, 8, 1, 0]])
    config = np.array([[14, 14, 8, 9], [0, 1, 0, 0]], np.float32)  # tile, packed
    assert has_conflicts(table, outer_dimensions(sizes((64, 1024)), 4), config).tolist() == [[True, False, False, True]]
    assert not has_conflicts(table, outer_dimensions(sizes((64, 1000)), 4), config).any()
    assert not has_conflicts(
        table, outer_dimensions(sizes((8, 1024)), 4), config
    ).any()  # there are no more rows than ways


def conflict_samples(slow: bool) -> ConflictSamples:
    """Kernels of 700 to 2,100 columns under tiles of 2 to 14 rows, packed or not; unpacked ones suffer if `slow`."""
    rng = np.random.default_rng(0)
    lengths = np.array([704, 768, 1000, 1024, 1100, 1280, 1536, 1920, 2048, 2100] * 6)
    outer = np.stack([outer_dimensions(sizes((64, int(n))), 4) for n in lengths])
    tile, packed = (part.ravel().astype(float) for part in np.meshgrid(np.arange(2, 15), [0, 1]))
    kernel = np.repeat(np.arange(len(lengths)), len(tile))
    config = np.stack([np.tile(tile, len(lengths)), np.tile(packed, len(lengths))], axis=1)
    rows = np.minimum(config[:, 0], 64) / outer[kernel, 0, ROWS_OF_FIRST]
    log_runtime = 0.1 * np.round(np.log2(lengths[kernel])) * np.log2(config[:, 0]) + 0.02 * rng.standard_normal(
        len(kernel)
    )
    log_runtime += 0.3 * slow * ((rows > 8) & (config[:, 1] == 0))
    return ConflictSamples(config, kernel, log_runtime, outer)


def test_a_slow_conflict_is_selected_with_its_flag():
    table = fit_cache_conflicts([0], [1], conflict_samples(True))
    assert [0, ROWS_OF_FIRST, 8, 1, 0] in table.tolist()


def test_nothing_is_selected_if_conflicts_cost_nothing():
    assert len(fit_cache_conflicts([0], [1], conflict_samples(False))) == 0
    assert len(RankerFeatures.fit(load_dataset("h200", limit=60).train).cache_conflicts) == 0


def test_the_measured_processor_has_them():
    """Unpacked rows of the left operand, more of them than the cache has ways."""
    split = load_dataset("cpu").train
    names = list(split.schema.config_features)
    rows, pack = names.index("register_m"), names.index("pack_a")
    table = RankerFeatures.fit(split).cache_conflicts.tolist()
    assert [rows, ROWS_OF_FIRST, 12, pack, 0] in table


def test_files_from_before_there_were_any_read_as_none():
    kernels = simulated_kernels(8, seed=1)
    fitted = RankerFeatures.fit(dataset_from_kernels(kernels[:6], kernels[6:]).train)
    old = {name: table for name, table in fitted.tensors().items() if name != "crowds"}
    assert RankerFeatures.restore(old, {}).cache_conflicts.shape == NO_CONFLICTS.shape
    assert kernel_sizes(kernels[0]).shape == (28,)
