"""An integer product gives NumPy's integers whatever the bytes, with every instruction set and on AMX tiles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.quantize.layers import INT32, new_kernel
from tilewise.quantize.reference import NumpyInt8Layer

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
ACTIVATIONS = ["any", "all 255", "all 0", "relu", "centred"]
WEIGHTS = ["any", "all -128", "all 127", "bell", "small"]


@pytest.fixture(params=["portable", "avx2", "avx vnni", "avx512", "amx", "emulated amx"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert native is not None
    before, tiles, vnni = native.isa(), native.amx(), native.avx_vnni()
    wanted = {"amx": "avx512", "emulated amx": "avx512", "avx vnni": "avx2"}.get(request.param, request.param)
    missing = (request.param == "amx" and tiles == "off") or (request.param == "avx vnni" and not vnni)
    if wanted not in native.supported_isas() or missing:
        pytest.skip("this CPU has no such instructions")
    native.set_isa(wanted)
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
    }[kind]
    return values.astype(np.int8)


@pytest.mark.parametrize("w_kind", WEIGHTS)
@pytest.mark.parametrize("x_kind", ACTIVATIONS)
def test_products_are_numpys_for_extreme_bytes_and_odd_sizes(isa: str, x_kind: str, w_kind: str) -> None:
    rng = np.random.default_rng(0)
    for m, n, k in [(1, 17, 36), (2, 1, 4), (3, 33, 20), (7, 16, 260), (130, 40, 64), (133, 5, 1028), (289, 40, 1100)]:
        x, w = activations(rng, x_kind, (m, k)), weights(rng, w_kind, (n, k))
        offset = rng.integers(-1000, 1000, n).astype(np.int32)
        kernel = new_kernel(w[:, None, None, :], offset, np.ones(n), None)
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
            made = layer(w, offset, scale, None, (stride, stride), (pad, pad))
            made.set_output(100, 0, 255)
            made.set_residual(0.5, 7)
            results.append((made.conv(x, pad, None, 0, 0), made.conv(x, pad, skip, 0, 1)))
        for got, want in zip(*results, strict=True):
            assert np.array_equal(got[..., :columns], want[..., :columns]), w_kind
