"""Integer steps besides plain products: depthwise and grouped convolution, additions, products, scales, channels that
move. Each gives NumPy's bytes on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.quantize.between import finish_for
from tilewise.quantize.parameters import AffineParameters
from tilewise.quantize.reference import BENT, Finish, NumpyInt8Layer

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
RNG = np.random.default_rng(3)
ACTIVATIONS = ["", *BENT]
F = np.float32


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in native.supported_isas():
        pytest.skip("not on this CPU")
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def finish(activation: str = "", zero: int = 30) -> Finish:
    made = finish_for(activation, AffineParameters(0.02, zero))
    return made if activation else Finish("", 1.0, zero, 5, 250)


# channels, outputs, groups, kernel, stride, dilation, padding (top, left, bottom, right), size
CONVOLUTIONS = [
    (1, 1, 1, (3, 3), (1, 1), (2, 2), (2, 2, 2, 2), (5, 6)),
    (7, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), (5, 9)),
    (16, 16, 16, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (9, 11)),
    (37, 37, 37, (5, 5), (1, 1), (1, 1), (2, 2, 2, 2), (7, 8)),
    (21, 21, 21, (5, 5), (2, 2), (1, 1), (2, 2, 2, 2), (9, 17)),
    (33, 33, 33, (7, 7), (1, 1), (1, 1), (3, 3, 3, 3), (7, 9)),
    (18, 18, 18, (3, 1), (1, 3), (2, 1), (0, 1, 2, 0), (8, 10)),
    (12, 12, 3, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), (6, 7)),
    (32, 32, 8, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (9, 9)),
    (20, 30, 10, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), (4, 13)),
    (10, 35, 5, (2, 3), (1, 2), (1, 2), (0, 2, 1, 0), (7, 12)),
    (6, 19, 1, (3, 3), (1, 1), (3, 2), (3, 2, 3, 2), (8, 9)),
]


def image(channels: int, size: tuple[int, int], border: int, zero: int = 9, n: int = 2) -> np.ndarray:
    h, w = size
    x = np.full((n, h + 2 * border, w + 2 * border, -(-channels // 4) * 4), zero, np.uint8)
    x[:, border : border + h, border : border + w, :channels] = RNG.integers(0, 256, (n, h, w, channels))
    return x


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_convolution_in_groups_gives_numpys_bytes(isa: str, case: Any, activation: str, with_residual: bool) -> None:
    channels, outputs, groups, kernel, stride, dilation, padding, size = case
    w = RNG.integers(-127, 128, (outputs, *kernel, channels // groups)).astype(np.int8)
    offset = RNG.integers(-3000, 3000, outputs).astype(np.int32)
    scale = (RNG.random(outputs) * 0.01 + 1e-4).astype(F)
    layer = native.Int8GroupedLayer(w, offset, scale, groups, stride, padding, dilation)
    plain = NumpyInt8Layer(w, offset, scale, None, stride, padding, groups, dilation)
    np.testing.assert_array_equal(layer.weights(), w)
    for kernel_layer in (layer, plain):
        kernel_layer.set_finish(finish(activation).native())
        kernel_layer.set_residual(0.04, 17)
    border = max(padding) + 1
    x = image(channels, size, border)
    shape = plain.conv(x, border, None, 0, 0).shape[1:3]
    residual = image(outputs, shape, 1) if with_residual else None
    expected = plain.conv(x, border, residual, 1, 2)
    for threads in (1, 3):
        native.set_num_threads(threads)
        np.testing.assert_array_equal(layer.conv(x, border, residual, 1, 2), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("columns", [1, 16, 21, 40])
def test_a_product_with_an_activation_gives_numpys_bytes(isa: str, activation: str, columns: int) -> None:
    w = RNG.integers(-127, 128, (columns, 3, 3, 5)).astype(np.int8)
    offset, scale = RNG.integers(-900, 900, columns).astype(np.int32), np.full(columns, 3e-4, F)
    layers = [kind(w, offset, scale, None, (1, 1), (1, 1)) for kind in (native.Int8Layer, NumpyInt8Layer)]
    for layer in layers:
        layer.set_finish(finish(activation).native())
        layer.set_residual(0.03, 4)
    x = image(5, (6, 9), 1)
    residual = image(columns, (6, 9), 0)
    np.testing.assert_array_equal(*[layer.conv(x, 1, residual, 0, 1) for layer in layers])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("pixels", "channels"), [(1, 1), (3, 7), (5, 16), (4, 35), (2, 64)])
def test_numbers_between_products_are_numpys_bytes(isa: str, activation: str, pixels: int, channels: int) -> None:
    a, b = RNG.integers(0, 256, (2, pixels, channels)).astype(np.uint8)
    how = finish(activation)
    whole = [x.astype(np.int32) - z for x, z in ((a, 100), (b, 3))]
    total = whole[0].astype(F) * F(0.03) + whole[1].astype(F) * F(0.01)
    np.testing.assert_array_equal(native.int8_add(a, b, 0.03, 100, 0.01, 3, how.native()), how.bytes(total))
    product = (whole[0] * whole[1]).astype(F) * F(1e-3)
    np.testing.assert_array_equal(native.int8_mul(a, b, 1e-3, 100, 3, how.native()), how.bytes(product))
    gate = (whole[0] * whole[1][:1]).astype(F) * F(1e-3)
    np.testing.assert_array_equal(native.int8_mul(a, b[:1].copy(), 1e-3, 100, 3, how.native()), how.bytes(gate))
    by, plus = (RNG.standard_normal((2, channels)) * [[0.05], [2]]).astype(F)
    scaled = whole[0].astype(F) * by + plus
    np.testing.assert_array_equal(native.int8_affine(a, 100, by, plus, how.native()), how.bytes(scaled))


@pytest.mark.parametrize("channels", [2, 10, 58, 64, 116])
def test_channels_are_taken_in_any_order(isa: str, channels: int) -> None:
    x = RNG.integers(0, 256, (5, channels)).astype(np.uint8)
    shuffled = np.arange(channels).reshape(2, -1).T.reshape(-1)
    for order in (shuffled, RNG.permutation(channels), np.zeros(3, int)):
        np.testing.assert_array_equal(native.int8_take(x, order.tolist()), x[:, order])


@pytest.mark.parametrize("name", BENT)
def test_activations_in_numpy_are_the_functions_they_are_called(name: str) -> None:
    x = np.linspace(-30, 30, 4001).astype(F)
    wide = x.astype(np.float64)
    erf = np.vectorize(__import__("math").erf)
    exact = {
        "silu": wide / (1 + np.exp(-wide)),
        "sigmoid": 1 / (1 + np.exp(-wide)),
        "hard_swish": wide * np.clip(wide + 3, 0, 6) / 6,
        "hard_sigmoid": np.clip(wide + 3, 0, 6) / 6,
        "gelu": wide * 0.5 * (1 + erf(wide / 2**0.5)),
    }
    np.testing.assert_allclose(BENT[name](x), exact[name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", BENT)
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 0.004, 0.03, 0.5, 1e9])
def test_a_table_gives_the_byte_of_the_activation_or_its_neighbour(name: str, scale: float) -> None:
    if "sigmoid" in name and scale < 1e-3:
        pytest.skip("a sigmoid's output is never that small")
    how = finish_for(name, AffineParameters(scale, 40))
    x = (np.linspace(-80, 500, 20011) * scale).astype(F)
    x[:3] = np.inf, 1e30, 0
    exact = np.clip(BENT[name](x).astype(np.float64) * how.inverse + how.zero, 0, 255)
    assert np.abs(how.bytes(x) - exact).max() <= (0.65 if scale > 0.003 else 0.8)
    assert len(how.native()[3]) <= (1 << 14) + 2
    assert how.bytes(np.array([np.nan, -np.inf], F)).shape == (2,)


def test_misfits_get_a_sentence() -> None:
    w, one = np.ones((4, 3, 3, 1), np.int8), np.ones(4, F)
    offset = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="groups"):
        native.Int8GroupedLayer(w, offset, one, 3, (1, 1), (0, 0, 0, 0), (1, 1))
    with pytest.raises(ValueError, match="stride"):
        native.Int8GroupedLayer(w, offset, one, 4, (0, 1), (0, 0, 0, 0), (1, 1))
    layer = native.Int8GroupedLayer(w, offset, one, 4, (1, 1), (1, 1, 1, 1), (1, 1))
    with pytest.raises(ValueError, match="border"):
        layer.conv(np.zeros((1, 5, 5, 4), np.uint8), 0, None, 0, 0)
    with pytest.raises(ValueError, match="channels"):
        layer.conv(np.zeros((1, 7, 7, 8), np.uint8), 1, None, 0, 0)
    for fine, first in ((0.0, 0), (float("nan"), 0), (1.0, 1), (1.0, -(1 << 20))):
        with pytest.raises(ValueError, match="table"):
            native.int8_affine(np.zeros((1, 4), np.uint8), 0, one, one, (0, 0, 255, b"123", fine, first))
