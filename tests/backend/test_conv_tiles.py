"""Tiles of the convolution: each feasible one computes the same, others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilewise._extension import native
from tilewise.backend import (
    ConvTile,
    OptimizedBackend,
    check_tile,
    conv2d_shape,
    default_conv2d_tile,
    tile_space,
    use_backend,
)
from tilewise.errors import ConfigurationError, ShapeError

pytestmark = pytest.mark.skipif(native is None, reason="needs the compiled kernels")
kernels: Any = native
ISAS = kernels.supported_isas() if native is not None else []

SAME = (8, 64, 32, 32, 64, 3, 3, 1, 1, 1, 1, 1)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = kernels.isa(), kernels.num_threads()
    yield
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)


def arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    n, c, h, w, o, kh, kw, sh, sw, ph, pw, groups = shape
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((n, c, h, w)), rng.standard_normal((o, c // groups, kh, kw))
    return (
        x.astype(np.float32),
        weights.astype(np.float32),
        {"stride": (sh, sw), "padding": (ph, pw), "groups": groups},
    )


def exact(shape: tuple[int, ...]) -> np.ndarray:
    x, w, geometry = arrays(shape)
    with use_backend("numpy") as backend:
        return np.asarray(backend.dispatch("conv2d", x.astype(np.float64), w.astype(np.float64), **geometry))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 19, 18, 15, 83, 3, 3, 1, 1, 1, 1, 1),
        (1, 5, 9, 23, 40, 3, 3, 2, 1, 0, 2, 1),
        (3, 12, 7, 7, 66, 1, 1, 1, 1, 0, 0, 2),
        (1, 3, 21, 30, 17, 7, 5, 3, 2, 3, 1, 1),
    ],
)
def test_every_feasible_tile_gives_the_right_result(isa: str, threads: int, shape: tuple[int, ...]) -> None:
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)
    (x, w, geometry), want = arrays(shape), exact(shape)
    space = tile_space("conv2d", shape)
    every = {"direct", "winograd", "winograd2"}
    assert {tile.algorithm for tile in space} == (every if shape[5:9] == (3, 3, 1, 1) else {"direct"})
    for tile in space:
        output = kernels.conv2d(x, w, tile=tile, **geometry)
        assert np.abs(output - want).max() <= 1e-5 * np.abs(want).max(), str(tile)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    algorithm=st.sampled_from(["direct", "winograd", "winograd2"]),
    mr=st.integers(0, 6),
    vectors=st.integers(0, 2),
    block=st.integers(0, 400),
    panels=st.integers(0, 5),
    split=st.integers(0, 9),
)
def test_sizes_outside_the_listed_space_give_the_right_result_too(
    algorithm: str, mr: int, vectors: int, block: int, panels: int, split: int
) -> None:
    shape = (2, 19, 18, 15, 83, 3, 3, 1, 1, 1, 1, 1)
    lanes, _, most = kernels.conv_tile_limits()
    x, w, geometry = arrays(shape)
    tile = ConvTile(algorithm, mr, vectors * lanes, block, panels * most * lanes, split)
    want = kernels.conv2d(x, w, tile=ConvTile("direct"), **geometry)
    try:
        output = kernels.conv2d(x, w, tile=tile, **geometry)
    except ConfigurationError as error:  # as it must be on a machine with a small L2
        assume("working memory" not in str(error))
        raise
    np.testing.assert_allclose(output, want, atol=1e-5 * np.abs(want).max())


def test_a_layer_of_a_network_has_more_than_a_hundred_feasible_tiles() -> None:
    assert len(tile_space("conv2d", SAME, threads=1)) > 100


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    groups, kernel = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 3, 3, 5]))
    channels = st.sampled_from([1, 3, 16, 64, 130, 512, 1024])
    c, o = draw(channels) * groups, draw(channels) * groups
    h, w = draw(st.integers(kernel, 120)), draw(st.integers(kernel, 120))
    stride, padding = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return (draw(st.integers(1, 4)), c, h, w, o, kernel, kernel, stride, stride, padding, padding, groups)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(shapes(), st.sampled_from([1, 2, 7]))
def test_the_default_is_a_feasible_tile_of_the_space(shape: tuple[int, ...], threads: int) -> None:
    kernels.set_num_threads(threads)
    try:
        default = ConvTile(*kernels.conv_default_tile(shape))
        assert default in tile_space("conv2d", shape)
        check_tile("conv2d", shape, default)
    finally:
        kernels.set_num_threads(1)


def test_a_zero_field_means_the_default() -> None:
    x, w, geometry = arrays(SAME)
    full = default_conv2d_tile(x, w, **geometry)
    output = kernels.conv2d(x, w, tile=ConvTile(full.algorithm), **geometry)
    np.testing.assert_array_equal(output, kernels.conv2d(x, w, tile=full, **geometry))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"algorithm": "fft"}, "none of 'direct', 'winograd' and 'winograd2'"),
        ({"mr": 99}, "register file"),
        ({"nr": 3}, "one or two vectors"),
        ({"channels": 5}, "multiple of two vectors"),
        ({"block": -1}, "block"),
        ({"split": 5000}, "split"),
        ({"block": 1 << 20}, "L2"),
    ],
)
def test_an_infeasible_tile_is_refused_with_the_reason(fields: dict[str, Any], says: str) -> None:
    shape = (1, 256, 120, 120, 64, 3, 3, 1, 1, 1, 1, 1)
    x, w, geometry = arrays(shape)
    tile = replace(ConvTile("winograd"), **fields)
    with pytest.raises(ConfigurationError, match=says):
        check_tile("conv2d", shape, tile)
    with pytest.raises(ConfigurationError, match=says):
        kernels.conv2d(x, w, tile=tile, **geometry)


def test_winograd_is_refused_where_it_does_not_apply() -> None:
    with pytest.raises(ConfigurationError, match="3x3"):
        check_tile("conv2d", (1, 8, 9, 9, 8, 3, 3, 2, 2, 1, 1, 1), ConvTile("winograd"))


@pytest.mark.parametrize(
    ("tile", "says"),
    [(7, "ConvTile"), (ConvTile("direct", mr="much"), "whole number")],  # type: ignore[arg-type]
)
def test_what_is_no_tile_is_refused_with_a_sentence(tile: Any, says: str) -> None:
    x, w, geometry = arrays(SAME)
    with pytest.raises(ConfigurationError, match=says):
        kernels.conv2d(x, w, tile=tile, **geometry)


@pytest.mark.parametrize(
    "shape", [(1, 2, 3), (0, *SAME[1:]), (*SAME[:7], 0, *SAME[8:]), (1, 3, 2, 2, *SAME[4:9], 0, 0, 1)]
)
def test_a_shape_that_is_no_convolution_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        tile_space("conv2d", shape)


def test_the_tile_chooser_is_asked_and_its_tile_is_used() -> None:
    x, w, geometry = arrays(SAME)
    keys: list[tuple[Any, ...]] = []
    tile = ConvTile("direct", mr=3, nr=kernels.conv_tile_limits()[0], block=64)

    def chooser(*key: Any) -> ConvTile:
        keys.append(key)
        return tile

    backend = OptimizedBackend(tile_chooser=chooser)
    output = backend.dispatch("conv2d", x, w, None, **geometry)
    assert keys == [("conv2d", SAME, "float32", "nchw")]
    np.testing.assert_array_equal(output, kernels.conv2d(x, w, tile=tile, **geometry))
    assert not np.array_equal(output, kernels.conv2d(x, w, **geometry)), "winograd rounds otherwise"
    backend.tile_chooser = lambda *_: ConvTile("direct", mr=99)
    with pytest.raises(ConfigurationError, match="register file"):
        backend.dispatch("conv2d", x, w, **geometry)


def test_explain_names_the_tile() -> None:
    x, w, geometry = arrays(SAME)
    backend = OptimizedBackend()
    explanation = backend.explain("conv2d", x, w, **geometry)
    assert explanation.tile == default_conv2d_tile(x, w, **geometry) and "winograd" in str(explanation)
    assert conv2d_shape(x, w, **geometry) == SAME
    backend.tile_chooser = lambda *_: ConvTile("direct", mr=2)
    assert backend.explain("conv2d", x, w, **geometry).tile == ConvTile("direct", mr=2)
    assert backend.explain("conv2d", x, w, tile=ConvTile("direct", mr=3), **geometry).tile == ConvTile("direct", mr=3)
