"""Integer steps besides plain products: depthwise and grouped convolution, additions, products, scales, channels that
move. Each gives NumPy's bytes on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.quantize.operators import accumulator_scale, output_stage
from tilewise.quantize.parameters import AffineParameters
from tilewise.quantize.reference import ACTIVATION_FUNCTIONS, NumpyInt8Layer, Uint8OutputStage

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
RNG = np.random.default_rng(3)
LEAKY = "leaky_relu 0.1"
ACTIVATIONS = ["", *ACTIVATION_FUNCTIONS, LEAKY]
F = np.float32


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in native.supported_isas():
        pytest.skip("not on this CPU")
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def finish(activation: str = "", zero: int = 30) -> Uint8OutputStage:
    stage = output_stage(activation, AffineParameters(0.02, zero))
    return stage if activation else Uint8OutputStage("", 1.0, zero, 5, 250)


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


def image(channels: int, size: tuple[int, int], halo: int, zero: int = 9, n: int = 2) -> np.ndarray:
    h, w = size
    x = np.full((n, h + 2 * halo, w + 2 * halo, -(-channels // 4) * 4), zero, np.uint8)
    x[:, halo : halo + h, halo : halo + w, :channels] = RNG.integers(0, 256, (n, h, w, channels))
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
        kernel_layer.set_uint8_stage(finish(activation).native())
        kernel_layer.set_residual(0.04, 17)
    halo = max(padding) + 1
    x = image(channels, size, halo)
    shape = plain.conv(x, halo, None, 0, 0).shape[1:3]
    residual = image(outputs, shape, 1) if with_residual else None
    expected = plain.conv(x, halo, residual, 1, 2)
    for threads in (1, 3):
        native.set_num_threads(threads)
        np.testing.assert_array_equal(layer.conv(x, halo, residual, 1, 2), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("columns", [1, 16, 21, 40])
def test_a_product_with_an_activation_gives_numpys_bytes(isa: str, activation: str, columns: int) -> None:
    w = RNG.integers(-127, 128, (columns, 3, 3, 5)).astype(np.int8)
    offset, scale = RNG.integers(-900, 900, columns).astype(np.int32), np.full(columns, 3e-4, F)
    layers = [kind(w, offset, scale, None, (1, 1), (1, 1)) for kind in (native.Int8Layer, NumpyInt8Layer)]
    for layer in layers:
        layer.set_uint8_stage(finish(activation).native())
        layer.set_residual(0.03, 4)
    x = image(5, (6, 9), 1)
    residual = image(columns, (6, 9), 0)
    np.testing.assert_array_equal(*[layer.conv(x, 1, residual, 0, 1) for layer in layers])


def through_graph(operator: str, arrays: list[np.ndarray], zeros: tuple[int, ...], *settings: Any) -> np.ndarray:
    """Run one operator of a native graph on rows (pixels, channels) of bytes, each a row of an image."""
    graph, images = native.Graph(), []
    for x in arrays:
        images.append(np.pad(x, ((0, 0), (0, -x.shape[1] % 4)))[None, None])  # (1, 1, pixels, whole groups of four)
    values = [graph.dynamic_input("uint8", False, x.shape[1], 0, z) for x, z in zip(arrays, zeros, strict=True)]
    graph.output(getattr(graph, operator)(*values, *settings))
    result: np.ndarray = graph.run(images)[0][0, 0]
    return result


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("pixels", "channels"), [(1, 1), (3, 7), (5, 16), (4, 35), (2, 64)])
def test_numbers_between_products_are_numpys_bytes(isa: str, activation: str, pixels: int, channels: int) -> None:
    a, b = RNG.integers(0, 256, (2, pixels, channels)).astype(np.uint8)
    how = finish(activation)
    whole = [x.astype(np.int32) - z for x, z in ((a, 100), (b, 3))]
    total = whole[0].astype(F) * F(0.03) + whole[1].astype(F) * F(0.01)
    same = np.testing.assert_array_equal
    same(through_graph("add", [a, b], (100, 3), 0.03, 0.01, how.native(), 0)[:, :channels], how.requantize(total))
    product = (whole[0] * whole[1]).astype(F) * F(1e-3)
    same(through_graph("mul", [a, b], (100, 3), 1e-3, 0.0, how.native(), 0)[:, :channels], how.requantize(product))
    gate = (whole[0] * whole[1][:1]).astype(F) * F(1e-3)
    same(through_graph("mul", [a, b[:1]], (100, 3), 1e-3, 0.0, how.native(), 0)[:, :channels], how.requantize(gate))
    by, plus = (RNG.standard_normal((2, channels)) * [[0.05], [2]]).astype(F)
    scaled = whole[0].astype(F) * by + plus
    same(
        through_graph("affine", [a], (100,), by.tolist(), plus.tolist(), how.native(), 0)[:, :channels],
        how.requantize(scaled),
    )


@pytest.mark.parametrize("channels", [2, 10, 58, 64, 116])
def test_channels_are_taken_in_any_order(isa: str, channels: int) -> None:
    x = RNG.integers(0, 256, (5, channels)).astype(np.uint8)
    shuffled = np.arange(channels).reshape(2, -1).T.reshape(-1)
    for order in (shuffled, RNG.permutation(channels), np.zeros(3, int)):
        result = through_graph("gather_channels", [x], (0,), order.tolist())
        np.testing.assert_array_equal(result[:, : len(order)], x[:, order])


def exact(name: str, x: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf)
    with np.errstate(over="ignore"):
        functions: dict[str, Any] = {
            "silu": lambda: x / (1 + np.exp(-x)),
            "sigmoid": lambda: 1 / (1 + np.exp(-x)),
            "hard_swish": lambda: x * np.clip(x + 3, 0, 6) / 6,
            "hard_sigmoid": lambda: np.clip(x + 3, 0, 6) / 6,
            "gelu": lambda: x * 0.5 * (1 + erf(x / 2**0.5)),
            LEAKY: lambda: np.maximum(x, 0.1 * x),
        }
        values: np.ndarray = functions[name]()
    return values


@pytest.mark.parametrize("name", [*ACTIVATION_FUNCTIONS, LEAKY])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 0.004, 0.016, 0.03, 0.5, 3, 63, 1e9, 1e30])
@pytest.mark.parametrize("zero", [0, 40])
def test_bytes_are_the_activations_or_their_neighbours(name: str, scale: float, zero: int) -> None:
    if "sigmoid" in name and scale < 1e-3:
        pytest.skip("a sigmoid's output is never that small")
    output = AffineParameters(scale, zero)
    how = output_stage(name, output)
    x = np.linspace(-80, 500, 20011) * scale
    x[:2] = 1e30, 0
    want = np.clip(exact(name, x) / scale + zero, 0, 255)
    with np.errstate(over="ignore"):
        values = (x / accumulator_scale(how, output)).astype(F)
    assert np.abs(how.requantize(values) - want).max() <= (0.65 if scale > 0.003 else 0.8)
    assert len(how.native()[3]) <= (1 << 14) + 2
    ends = how.requantize(np.array([np.nan, -np.inf, np.inf], F))
    assert scale < 1e-3 or how.takes_real_values or tuple(ends[1:]) == (zero, 255)


@pytest.mark.parametrize("name", ["hard_swish", "silu", "gelu"])
@pytest.mark.parametrize("step", [1e-3, 0.016, 0.024, 0.7, 63.0])
def test_every_value_that_a_byte_can_have_is_bent_alike(isa: str, name: str, step: float) -> None:
    """All products of a byte and a weight, far and near, and what no product gives."""
    how = output_stage(name, AffineParameters(step, 20))
    x = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 509, 1)
    by = (np.arange(-254, 255) / 97).astype(F)
    for plus in (np.zeros(509, F), np.linspace(-40, 40, 509).astype(F) / F(step)):
        value = (x.astype(np.int32) - 100).astype(F) * by + plus
        result = through_graph("affine", [x], (100,), by.tolist(), plus.tolist(), how.native(), 0)
        np.testing.assert_array_equal(result[:, :509], how.requantize(value))
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0] * 5, F)
    one = np.full((1, 35), 101, np.uint8)
    result = through_graph("affine", [one], (100,), [0.0] * 35, odd.tolist(), how.native(), 0)
    np.testing.assert_array_equal(result[0, :35], how.requantize(odd))


def test_misfits_get_a_sentence() -> None:
    w, one = np.ones((4, 3, 3, 1), np.int8), np.ones(4, F)
    offset = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="groups"):
        native.Int8GroupedLayer(w, offset, one, 3, (1, 1), (0, 0, 0, 0), (1, 1))
    with pytest.raises(ValueError, match="stride"):
        native.Int8GroupedLayer(w, offset, one, 4, (0, 1), (0, 0, 0, 0), (1, 1))
    layer = native.Int8GroupedLayer(w, offset, one, 4, (1, 1), (1, 1, 1, 1), (1, 1))
    with pytest.raises(ValueError, match="padding"):
        layer.conv(np.zeros((1, 5, 5, 4), np.uint8), 0, None, 0, 0)
    with pytest.raises(ValueError, match="channels"):
        layer.conv(np.zeros((1, 7, 7, 8), np.uint8), 1, None, 0, 0)
    for fine, first in ((0.0, 0), (float("nan"), 0), (1.0, 1), (1.0, -(1 << 20))):
        with pytest.raises(ValueError, match="table"):
            native.Graph().affine(0, [], [], (0, 0, 255, b"123", fine, first, 0.0, 0.0, b""), 0)
    for high, pieces in ((255, b"123"), (200, bytes(52)), (255, bytes(48) + b"\x0f\x00\x01\x00")):
        with pytest.raises(ValueError, match="piecewise polynomial"):
            native.Graph().affine(0, [], [], (0, 0, high, b"", 1.0, 0, 0.0, 0.0, pieces), 0)
