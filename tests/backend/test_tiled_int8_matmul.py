"""Tiles of the integer product: each feasible one gives the same integers, others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._extension import native
from tilewise.backend import Int8Tile, check_tile, tile_space
from tilewise.backend.tiled import tiled_op
from tilewise.errors import ConfigurationError

pytestmark = pytest.mark.skipif(native is None, reason="needs the compiled kernels")
kernels: Any = native
ISAS = kernels.supported_isas() if native is not None else []
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = kernels.isa(), kernels.num_threads()
    yield
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)


def make(shape: tuple[int, int, int]) -> tuple[Any, np.ndarray, np.ndarray]:
    """A layer, bytes for it, and the sums it has to give."""
    m, n, k = shape
    x = np.zeros((m, -(-k // 4) * 4), np.uint8)
    x[:, :k] = RNG.integers(0, 256, (m, k))
    w = RNG.integers(-128, 128, (n, k)).astype(np.int8)
    offset = RNG.integers(-1000, 1000, n).astype(np.int32)
    scale, bias = RNG.uniform(1e-4, 2e-3, n).astype(np.float32), RNG.normal(size=n).astype(np.float32)
    layer = kernels.Int8Layer(w[:, None, None, :], offset, scale, bias, (1, 1), (0, 0))
    layer.set_output(9, 0, 255)
    return layer, x, x[:, :k].astype(np.int32) @ w.T.astype(np.int32) + offset


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 40, 300), (37, 70, 45), (600, 17, 9), (5, 200, 600)])
def test_every_tile_of_the_space_gives_the_same_integers(isa: str, threads: int, shape: tuple[int, int, int]) -> None:
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)
    layer, x, sums = make(shape)
    tiles = tile_space("int8_matmul", shape, threads=threads)
    assert len(tiles) >= 2
    for tile in tiles:
        assert np.array_equal(layer.linear(x, 0, None, False, tile), sums), str(tile)


@pytest.mark.parametrize("isa", ISAS)
def test_the_epilogues_do_not_depend_on_the_tile(isa: str) -> None:
    kernels.set_isa(isa)
    layer, x, _ = make((50, 72, 300))
    row_scale = RNG.uniform(0.5, 2, 50).astype(np.float32)
    for kind, scales, relu in ((1, row_scale, True), (1, None, False), (2, None, False)):
        usual = layer.linear(x, kind, scales, relu)
        for tile in tile_space("int8_matmul", (50, 72, 300), threads=2)[::5]:
            assert np.array_equal(layer.linear(x, kind, scales, relu, tile), usual), str(tile)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 90)),
    mr=st.integers(1, 16),
    panels=st.sampled_from([1, 2, 4]),
    blocks=st.tuples(st.integers(1, 100), st.integers(1, 4), st.integers(1, 30)),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_any_tile_is_right_or_refused(
    shape: tuple[int, int, int], mr: int, panels: int, blocks: tuple[int, int, int], grid: tuple[int, int]
) -> None:
    layer, x, sums = make(shape)
    tile = Int8Tile(mr, 16 * panels, blocks[0], 16 * panels * blocks[1], 4 * blocks[2], *grid)
    if kernels.int8_tile_problem(tile, shape[2]) is None:
        assert np.array_equal(layer.linear(x, 0, None, False, tile), sums)
    else:
        with pytest.raises(ValueError, match="this tile cannot be used"):
            layer.linear(x, 0, None, False, tile)


def test_the_default_is_in_the_space_and_the_space_is_wide() -> None:
    kernels.set_num_threads(1)
    for shape in ((1, 1024, 1024), (256, 256, 256), (3136, 64, 576)):
        tiles = tile_space("int8_matmul", shape)
        assert tiled_op("int8_matmul").default(kernels, shape, None, 1) == tiles[0]
        assert len(set(tiles)) == len(tiles)
    if kernels.isa().startswith("avx512"):
        assert len(tile_space("int8_matmul", (512, 512, 1024))) >= 200


GOOD = Int8Tile(4, 16, 64, 64, 64)


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (replace(GOOD, nr=24), "nr must be 16, 32 or 64"),
        (replace(GOOD, nr=48, nc=48), "no register tile of so many columns"),
        (replace(GOOD, nr=1600, nc=1600), "no register tile of so many columns"),
        (replace(GOOD, mr=17), "no register tile of so many rows"),
        (replace(GOOD, mr=0), "no register tile of so many rows"),
        (replace(GOOD, mc=513), "mc must be from 1 to 512"),
        (replace(GOOD, mc=0), "mc must be from 1 to 512"),
        (replace(GOOD, nc=40), "nc must be a whole number"),
        (replace(GOOD, nc=0), "nc must be a whole number"),
        (replace(GOOD, kc=30), "kc must be a whole number of groups"),
        (replace(GOOD, kc=0), "kc must be a whole number of groups"),
        (replace(GOOD, mc=512, nc=4096), "exceed 4 MiB"),
        (replace(GOOD, threads_m=0), "threads_m and threads_n"),
        (replace(GOOD, threads_n=5000), "threads_m and threads_n"),
        (replace(GOOD, mc=1 << 40), "whole number mc"),
        (replace(GOOD, mr="wide"), "whole number mr"),  # type: ignore[arg-type]
        (None, "must be an Int8Tile"),
    ],
)
def test_a_tile_that_cannot_be_used_is_refused_with_the_reason(tile: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_tile("int8_matmul", (100, 100, 100), tile)
    if tile is not None:
        layer, x, _ = make((100, 100, 100))
        with pytest.raises(ValueError, match=reason):
            layer.linear(x, 0, None, False, tile)


@pytest.mark.parametrize("shape", [(1, 2), (0, 4, 4), (4, 4, -4)])
def test_a_shape_without_a_product_is_one_sentence(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="the shape of an int8_matmul"):
        tile_space("int8_matmul", shape)
    with pytest.raises(ConfigurationError, match="layout of an INT8 product"):
        tile_space("int8_matmul", (4, 4, 4), layout="nn")
