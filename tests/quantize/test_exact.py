"""An integer product gives NumPy's integers whatever the bytes, with every instruction set and on AMX tiles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.graph.ir import Op
from tilewise.quantize.layers import INT32, Geometry, packed_layer
from tilewise.quantize.operators import Movement, accumulator_scale, output_stage
from tilewise.quantize.parameters import affine_from_range
from tilewise.quantize.reference import NumpyInt8Layer

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
ACTIVATIONS = ["any", "all 255", "all 0", "relu", "centred"]
WEIGHTS = ["any", "all -128", "all 127", "bell", "small", "quads", "all -32"]


@pytest.fixture(params=["portable", "avx2", "avx vnni", "avx512", "amx", "emulated amx"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert native is not None
    before, tiles, vnni = native.isa(), native.amx(), native.avx_vnni()
    base_isa = {"amx": "avx512", "emulated amx": "avx512", "avx vnni": "avx2"}.get(request.param, request.param)
    missing = (request.param == "amx" and tiles == "off") or (request.param == "avx vnni" and not vnni)
    if base_isa not in native.supported_isas() or missing:
        pytest.skip("this CPU has no such instructions")
    native.set_isa(base_isa)
    native.set_avx_vnni(request.param == "avx vnni")
    native.set_amx({"amx": "hardware", "emulated amx": "emulated"}.get(request.param, "off"))
    yield request.param
    native.set_isa(before)
    native.set_amx(tiles)
    native.set_avx_vnni(vnni)


def activations(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    spread = rng.standard_normal(shape)
    values = {
        "any": rng.integers(0, 256, shape),
        "all 255": np.full(shape, 255),
        "all 0": np.zeros(shape),
        "relu": 60 * np.maximum(spread, 0),
        "centred": 128 + 30 * spread,
    }[kind]
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def weights(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    values = {
        "any": rng.integers(-128, 128, shape),
        "all -128": np.full(shape, -128),
        "all 127": np.full(shape, 127),
        "bell": np.clip(np.rint(36 * rng.standard_normal(shape)), -127, 127),
        "small": rng.integers(-64, 65, shape),
        "quads": rng.integers(-32, 33, shape),
        "all -32": np.full(shape, -32),
    }[kind]
    return values.astype(np.int8)


@pytest.mark.parametrize("w_kind", WEIGHTS)
@pytest.mark.parametrize("x_kind", ACTIVATIONS)
def test_products_are_numpys_for_extreme_bytes_and_odd_sizes(isa: str, x_kind: str, w_kind: str) -> None:
    rng = np.random.default_rng(0)
    for m, n, k in [(1, 17, 36), (2, 1, 4), (3, 33, 20), (7, 16, 260), (130, 40, 64), (133, 5, 1028), (289, 40, 1100)]:
        x, w = activations(rng, x_kind, (m, k)), weights(rng, w_kind, (n, k))
        offset = rng.integers(-1000, 1000, n).astype(np.int32)
        kernel = packed_layer(w[:, None, None, :], offset, np.ones(n), None)
        want = x.astype(np.int32) @ w.T.astype(np.int32) + offset
        assert np.array_equal(kernel.linear(x, INT32, None, False), want), (m, n, k)


@pytest.mark.parametrize("x_kind", ACTIVATIONS)
@pytest.mark.parametrize(
    "channels, columns, kernel, stride, size",
    [(4, 64, 7, 2, 23), (4, 5, 3, 1, 9), (8, 16, 3, 1, 14), (12, 33, 5, 2, 11), (64, 48, 3, 2, 9), (64, 17, 1, 2, 13)],
)
def test_convolutions_are_numpys(
    isa: str, x_kind: str, channels: int, columns: int, kernel: int, stride: int, size: int
) -> None:
    rng = np.random.default_rng(1)
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    for w_kind in WEIGHTS:
        w = weights(rng, w_kind, (columns, kernel, kernel, channels))
        x = activations(rng, x_kind, (2, size + 2 * pad, size + 2 * pad, channels))
        offset = rng.integers(-1000, 1000, columns).astype(np.int32)
        scale = np.full(columns, 1 / (3 * kernel * kernel * channels), np.float32)
        skip = activations(rng, "any", (2, out, out, -(-columns // 4) * 4))
        results = []
        for layer in (native.Int8Layer, NumpyInt8Layer):
            packed = layer(w, offset, scale, None, (stride, stride), (pad, pad))
            packed.set_output(100, 0, 255)
            packed.set_residual(0.5, 7)
            results.append((packed.conv(x, pad, None, 0, 0), packed.conv(x, pad, skip, 0, 1)))
        for output, want in zip(*results, strict=True):
            assert np.array_equal(output[..., :columns], want[..., :columns]), w_kind


@pytest.mark.parametrize("w_kind", ["any", "small", "quads"])
@pytest.mark.parametrize("activation", ["", "relu", "silu", "hard_swish", "sigmoid"])
@pytest.mark.parametrize("skips", [False, True])
def test_bytes_are_numpys_for_every_width_of_the_result(isa: str, w_kind: str, activation: str, skips: bool) -> None:
    """Whole panels of columns, halves and less; rows of tiles and what is left of them."""
    rng = np.random.default_rng(2)
    output, residual = affine_from_range(-2.0, 3.0), affine_from_range(-1.0, 2.0)
    finish = output_stage(activation, output)
    shapes = [(24, 12, 1, 9), (8, 20, 3, 6), (40, 4, 3, 7), (16, 36, 1, 5), (12, 8, 2, 4), (33, 5, 3, 5)]
    for columns, channels, taps, size in shapes:
        w = weights(rng, w_kind, (columns, taps, taps, channels))
        scale = (rng.random(columns) + 0.5) / (40 * 64 * taps * channels**0.5) / accumulator_scale(finish, output)
        offset = rng.integers(-99, 99, columns).astype(np.int32)
        geometry, padding = Geometry(padding=(taps // 2,) * 4), (taps // 2, taps // 2)
        kernel = packed_layer(w, offset, scale, geometry=geometry)
        reference = NumpyInt8Layer(w, offset, scale.astype(np.float32), None, (1, 1), padding)
        x = activations(rng, "any", (2, size + 2, size + 2, -(-channels // 4) * 4))
        side = size + 2 * (taps // 2) - taps + 1
        skip = activations(rng, "any", (2, side, side, -(-columns // 4) * 4)) if skips else None
        for layer in (kernel, reference):
            layer.set_uint8_stage(finish.native())
            layer.set_residual(residual.scale / accumulator_scale(finish, output), residual.zero_point)
        actual, want = (layer.conv(x, 1, skip, 0, 0) for layer in (kernel, reference))
        assert np.array_equal(actual[..., :columns], want[..., :columns]), (columns, channels, taps)


@pytest.mark.parametrize("w_kind", WEIGHTS)
@pytest.mark.parametrize("x_kind", ["any", "all 255", "centred"])
def test_convolutions_in_groups_are_numpys(isa: str, x_kind: str, w_kind: str) -> None:
    rng = np.random.default_rng(3)
    for groups, inner, outer, taps in [
        (4, 4, 4, 3),
        (2, 8, 16, 3),
        (3, 16, 8, 1),
        (5, 3, 2, 3),
        (2, 6, 17, 2),
        (2, 32, 5, 3),
    ]:
        columns, channels = groups * outer, groups * inner
        w = weights(rng, w_kind, (columns, taps, taps, inner))
        scale, offset = np.full(columns, 1e-3 / inner), rng.integers(-99, 99, columns).astype(np.int32)
        geometry = Geometry((1, 1), (1, 1, 1, 1), groups)
        kernel = packed_layer(w, offset, scale, geometry=geometry)
        reference = NumpyInt8Layer(w, offset, scale.astype(np.float32), None, (1, 1), geometry.padding, groups, (1, 1))
        x = activations(rng, x_kind, (1, 8, 11, -(-channels // 4) * 4))
        finish = output_stage("", affine_from_range(-1.0, 2.0))
        for layer in (kernel, reference):
            layer.set_uint8_stage(finish.native())
        output, want = (layer.conv(x, 1, None, 0, 0) for layer in (kernel, reference))
        assert np.array_equal(output[..., :columns], want[..., :columns]), (groups, inner, outer, taps)


@pytest.mark.parametrize("channels", [1, 4, 5, 12, 16, 24, 31, 32, 33, 58, 63, 64, 65, 100, 130])
def test_the_largest_byte_of_a_window_is_numpys_for_every_number_of_channels(isa: str, channels: int) -> None:
    rng = np.random.default_rng(4)
    for kernel, stride, padding in [((3, 3), (2, 2), (1, 1)), ((2, 3), (1, 2), (0, 1)), ((1, 1), (3, 1), (0, 0))]:
        x = rng.integers(0, 256, (2, 9, 11, -(-channels // 4) * 4)).astype(np.uint8)
        options = {"kernel": kernel, "stride": stride, "padding": (*padding, *padding)}
        graph = native.Graph()
        value = graph.dynamic_input("uint8", False, channels)
        op = Op("max_pool", (0,), (2, channels, 9, 11), options=options)
        graph.output(Movement(affine_from_range(-1.0, 2.0), op=op).add_to(graph, [value], []))
        around = np.pad(x, ((0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(around, kernel, (1, 2)).max((4, 5))
        want = windows[:, :: stride[0], :: stride[1], :channels]
        assert np.array_equal(graph.run([x])[0][..., :channels], want)
