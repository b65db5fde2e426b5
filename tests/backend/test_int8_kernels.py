"""The integer kernels give the integers of a plain NumPy reference, on every instruction set and thread count."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise._extension import native
from tilewise.quantize import AffineParameters, quantize_array
from tilewise.quantize import layers as layers_module
from tilewise.quantize.layers import quantize_rows

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
RNG = np.random.default_rng(0)
ISAS = native.supported_isas() if native is not None else []


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture(params=[1, 2, 7])
def threads(request: pytest.FixtureRequest):
    before = tilewise.get_num_threads()
    tilewise.set_num_threads(request.param)
    yield request.param
    tilewise.set_num_threads(before)


def filled(shape: tuple[int, ...], dtype: type, how: str) -> np.ndarray:
    info = np.iinfo(dtype)
    if how == "random":
        return RNG.integers(info.min, info.max + 1, shape, dtype=dtype)
    return np.full(shape, {"low": info.min, "high": info.max, "zero": 0}[how], dtype)


def padded(x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), -(-x.shape[1] // 4) * 4), 77, np.uint8)  # what lies in the padding must not matter
    out[:, : x.shape[1]] = x
    return out


SHAPES = [
    (0, 3, 4),
    (1, 1, 1),
    (1, 17, 4),
    (3, 5, 8),
    (7, 33, 13),
    (9, 64, 36),
    (130, 70, 101),
    (1, 100, 1000),
    (300, 40, 64),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", ["random", "low", "high", "zero"])
def test_matrix_products_are_exact(isa: str, threads: int, shape: tuple[int, int, int], how: str) -> None:
    m, n, k = shape
    x, w = filled((m, k), np.uint8, "high" if how == "low" else how), filled((n, 1, 1, k), np.int8, how)
    offset = RNG.integers(-1000, 1000, n).astype(np.int32)
    layer = native.Int8Layer(w, offset, None, None, (1, 1), (0, 0))
    expected = x.astype(np.int32) @ w[:, 0, 0].T.astype(np.int32) + offset
    np.testing.assert_array_equal(layer.linear(padded(x), 0, None, False), expected)
    np.testing.assert_array_equal(layer.weights(), w)


CONVOLUTIONS = [  # images, channels, height, width, filters, kernel, stride, padding, halo, out halo, residual
    (2, 3, 8, 8, 16, 3, 1, 1, 1, 1, False),
    (1, 5, 7, 9, 17, 3, 2, 1, 2, 0, True),
    (2, 16, 5, 5, 33, 1, 1, 0, 0, 1, True),
    (1, 64, 6, 6, 64, 3, 1, 1, 1, 1, False),
    (1, 7, 11, 6, 5, 5, 2, 2, 2, 2, True),
    (0, 4, 4, 4, 4, 3, 1, 1, 1, 1, False),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_round_as_numpy_does(isa: str, threads: int, case: tuple) -> None:
    n, c, h, w, f, k, stride, padding, halo, out_padding, with_residual = case
    zero_in, zero_out = int(RNG.integers(0, 256)), 3
    x = RNG.integers(0, 256, (n, h, w, c), dtype=np.uint8)
    buffer = np.full((n, h + 2 * halo, w + 2 * halo, -(-c // 4) * 4), zero_in, np.uint8)
    buffer[:, halo : halo + h, halo : halo + w, :c] = x
    weight = RNG.integers(-127, 128, (f, k, k, c), dtype=np.int8)
    offset = (-zero_in * weight.astype(np.int32).sum((1, 2, 3))).astype(np.int32)
    scale = (RNG.random(f) * 0.01).astype(np.float32)
    layer = native.Int8Layer(weight, offset, scale, None, (stride, stride), (padding, padding))
    layer.set_output(zero_out, zero_out, 255)
    total = reference_convolution(x.astype(np.int64) - zero_in, weight, stride, padding)
    value = total.astype(np.int32).astype(np.float32) * scale
    residual = None
    if with_residual:
        layer.set_residual(0.5, 7)
        residual = np.zeros((n, *(s + 2 for s in total.shape[1:3]), -(-f // 4) * 4), np.uint8)
        inner = RNG.integers(0, 256, total.shape, dtype=np.uint8)
        residual[:, 1:-1, 1:-1, :f] = inner
        value = value + (inner.astype(np.int32) - 7).astype(np.float32) * np.float32(0.5)
    expected = np.clip(np.rint(np.clip(value, -1e6, 1e6)).astype(np.int32) + zero_out, zero_out, 255)
    output = layer.conv(buffer, halo, residual, 1, out_padding)
    stop_h, stop_w = output.shape[1] - out_padding, output.shape[2] - out_padding
    np.testing.assert_array_equal(output[:, out_padding:stop_h, out_padding:stop_w, :f], expected)
    frame = np.ones(output.shape[1:3], bool)
    frame[out_padding:stop_h, out_padding:stop_w] = False
    assert (output[:, frame] == zero_out).all()


def reference_convolution(x: np.ndarray, weight: np.ndarray, stride: int, padding: int) -> np.ndarray:
    k = weight.shape[1]
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))[:, ::stride, ::stride]  # (n, oh, ow, c, k, k)
    return np.einsum("nhwcij,fijc->nhwf", windows, weight.astype(np.int64))


@pytest.mark.parametrize("how", ["low", "high", "zero", "one constant channel"])
@pytest.mark.parametrize("scale", [1e-9, 0.004, 1e30])
def test_convolutions_of_extremes_saturate_as_numpy_does(isa: str, threads: int, how: str, scale: float) -> None:
    x = np.full((2, 9, 9, 8), {"zero": 0}.get(how, 255), np.uint8)
    weight = filled((35, 3, 3, 8), np.int8, how if how in ("low", "high", "zero") else "random")
    if how == "one constant channel":
        weight[7] = -128
        x[..., 3] = 128
    offset = RNG.integers(-(2**20), 2**20, 35).astype(np.int32)
    layer = native.Int8Layer(weight, offset, np.full(35, scale, np.float32), None, (1, 1), (0, 0))
    layer.set_output(200, 0, 255)
    total = (reference_convolution(x.astype(np.int64), weight, 1, 0) + offset).astype(np.int32)
    value = np.clip(total.astype(np.float32) * np.float32(scale), np.float32(-200), np.float32(55))
    np.testing.assert_array_equal(layer.conv(x, 0, None, 0, 0)[..., :35], np.rint(value).astype(np.int32) + 200)


def test_floats_become_the_bytes_of_numpy(isa: str) -> None:
    rows = RNG.standard_normal((40, 133)).astype(np.float32)
    rows[1] = np.round(rows[1] * 20) / 40 * 127  # many ties
    rows[2], rows[3, :3] = 0, (np.nan, np.inf, -np.inf)
    rows[4] *= np.float32(1e-42)
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        rounded, scales = quantize_rows(rows)
        patch.setattr(layers_module, "native", None)
        expected, expected_scales = quantize_rows(rows)
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(scales, expected_scales)
    finite = np.nan_to_num(rows, nan=0.0, posinf=9.0, neginf=-9.0)
    for parameters in (AffineParameters(0.05, 3), AffineParameters(0.25, 128), AffineParameters(1e-3, 255)):
        image = finite.reshape(8, 5, 7, 19)
        bytes_of = quantize_array(image, parameters, 1).inside()[..., :5].transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(bytes_of, parameters.quantize(image))
        np.testing.assert_array_equal(quantize_array(finite, parameters).data[:, :133], parameters.quantize(finite))


def test_wrong_arrays_are_refused() -> None:
    w = np.zeros((4, 1, 1, 8), np.int8)
    layer = native.Int8Layer(w, np.zeros(4, np.int32), None, None, (1, 1), (0, 0))
    with pytest.raises(TypeError, match="x must be"):
        layer.linear(np.zeros((2, 8), np.int8), 0, None, False)
    with pytest.raises(ValueError, match="does not fit"):
        layer.linear(np.zeros((2, 4), np.uint8), 0, None, False)
    with pytest.raises(ValueError, match="no output scale"):
        layer.linear(np.zeros((2, 8), np.uint8), 2, None, False)
    with pytest.raises(ValueError, match="one number per column"):
        native.Int8Layer(w, np.zeros(3, np.int32), None, None, (1, 1), (0, 0))
    with pytest.raises(ValueError, match="padding"):
        native.Int8Layer(w, np.zeros(4, np.int32), np.ones(4, np.float32), None, (1, 1), (1, 1)).conv(
            np.zeros((1, 2, 2, 8), np.uint8), 0, None, 0, 0
        )
