"""Matrices in GGUF's blocks: the weights of the `gguf` package, exact integers, equal floats on every ISA."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilewise import Tensor
from tilewise._extension import native
from tilewise.errors import ConfigurationError, GradientError, ShapeError
from tilewise.gguf.tensors import KINDS, NumpyBlocks, block_matrix
from tilewise.quantize.block_linear import BlockEmbedding, BlockLinear

gguf = pytest.importorskip("gguf")
if native is None:
    pytest.skip("the compiled kernels are not built", allow_module_level=True)

INTEGERS = {code: kind for code, kind in KINDS.items() if kind.block > 1}
HALVES = {code: KINDS[code] for code in (1, 30)}
MINIMUM_AT = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}  # the float16 number after the scale is a minimum


@pytest.fixture
def isas() -> Iterator[list[str]]:
    before = native.isa()

    def usable(isa: str) -> bool:
        try:
            native.set_isa(isa)
        except ValueError:
            return False
        return True

    yield [isa for isa in ("portable", "avx2", "avx512") if usable(isa)]
    native.set_isa(before)


def random_bytes(code: int, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Bytes of a matrix: any codes, scales and minimums between 0.001 and 0.01."""
    kind, rng = KINDS[code], np.random.default_rng(seed)
    if kind.block == 1:
        numbers = rng.standard_normal((outputs, inputs)).astype(np.float32)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType(code)).view(np.uint8).reshape(-1)
    raw = rng.integers(0, 256, (outputs * inputs // kind.block, kind.block_bytes)).astype(np.uint8)
    places = [208] if kind.name == "Q6_K" else [0, 2] if kind.name in MINIMUM_AT else [0]
    for at in places:
        raw[:, at : at + 2] = rng.uniform(0.001, 0.01, len(raw)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


def dequantized(code: int, raw: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(code)
    data = raw.view(np.float16) if code == 1 else raw
    weights: np.ndarray = gguf.quants.dequantize(data.reshape(outputs, -1), kind).reshape(outputs, inputs)
    return weights


def shapes(block: int) -> list[tuple[int, int]]:
    wide = [(1, 256), (17, 512), (33, 768)]
    return wide if block == 256 else [*wide, (5, 96), (16, 32), (40, 160)]


@pytest.mark.parametrize("code", INTEGERS)
def test_integer_formats_are_the_same_floats_on_every_set_and_exact_but_for_the_inputs(
    code: int, isas: list[str]
) -> None:
    rng = np.random.default_rng(1)
    for outputs, inputs in shapes(KINDS[code].block):
        raw = random_bytes(code, outputs, inputs)
        weight, matrix = dequantized(code, raw, outputs, inputs), native.BlockMatrix(code, raw, outputs, inputs)
        np.testing.assert_array_equal(matrix.rows(np.arange(outputs)), weight)
        np.testing.assert_array_equal(native.BlockRows(code, raw, outputs, inputs).rows(np.arange(outputs)), weight)
        for count in (1, 2, 3, 5, 9, 70):
            x = rng.standard_normal((count, inputs)).astype(np.float32)
            q, scale, _ = native.quantize_row_blocks(x)
            rounded = (q.reshape(count, -1, 32) * scale[..., None].astype(np.float64)).reshape(count, -1)[:, :inputs]
            expected, results = rounded @ weight.T.astype(np.float64), []
            for isa in isas:
                native.set_isa(isa)
                results.append(matrix.linear(x))
                np.testing.assert_array_equal(results[-1], results[0], isa)
            assert np.abs(results[0] - expected).max() < 2e-6 * np.abs(expected).max()


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("code", HALVES)
def test_sixteen_bits_are_multiplied_by_floats_or_by_bfloat16(code: int, isas: list[str]) -> None:
    rng = np.random.default_rng(1)
    for outputs, inputs in [(1, 1), (17, 31), (40, 100), (33, 256), (70, 1102)]:  # 1102: two panels of inputs
        raw = random_bytes(code, outputs, inputs)
        weight, matrix = dequantized(code, raw, outputs, inputs), native.BlockMatrix(code, raw, outputs, inputs)
        np.testing.assert_array_equal(matrix.rows(np.arange(outputs)), weight)
        for isa in isas:
            native.set_isa(isa)
            for count in (1, 2, 3, 4, 7, 20, 49, 300):  # 300: two blocks of rows
                x = rng.standard_normal((count, inputs)).astype(np.float32)
                y, tolerance = matrix.linear(x), 1e-6 * np.sqrt(inputs) * 5
                exact = np.abs(y - x.astype(np.float64) @ weight.T).max() < tolerance
                # CPUs with AVX512_BF16 multiply pairs of bfloat16.
                pairs = code == 30 and isa == "avx512" and inputs % 2 == 0
                assert exact or (pairs and np.abs(y - to_bfloat16(x).astype(np.float64) @ weight.T).max() < tolerance)


@pytest.mark.parametrize("code", HALVES)
def test_threads_do_not_change_products_with_sixteen_bits(code: int) -> None:
    outputs, inputs, before = 301, 256, native.num_threads()
    matrix = native.BlockMatrix(code, random_bytes(code, outputs, inputs), outputs, inputs)
    for count in (1, 5, 90):
        x = np.random.default_rng(0).standard_normal((count, inputs)).astype(np.float32)
        results = []
        for threads in (1, 3):
            native.set_num_threads(threads)
            results.append(matrix.linear(x))
        native.set_num_threads(before)
        np.testing.assert_array_equal(*results)


def test_threads_do_not_change_the_numbers() -> None:
    code, outputs, inputs = 12, 1040, 1024
    matrix = native.BlockMatrix(code, random_bytes(code, outputs, inputs), outputs, inputs)
    before = native.num_threads()
    for count in (1, 30):
        x = np.random.default_rng(0).standard_normal((count, inputs)).astype(np.float32)
        native.set_num_threads(1)
        alone = matrix.linear(x)
        native.set_num_threads(3)
        np.testing.assert_array_equal(matrix.linear(x), alone)
        native.set_num_threads(before)


def test_numpy_and_an_arena_give_the_same_matrix() -> None:
    code, outputs, inputs = 14, 20, 256
    raw, arena = random_bytes(code, outputs, inputs), native.WeightArena(1 << 20)
    kind, x = KINDS[code], np.random.default_rng(0).standard_normal((3, inputs)).astype(np.float32)
    numpy, packed = NumpyBlocks(kind, raw, (outputs, inputs)), block_matrix(kind, raw, (outputs, inputs), arena)
    np.testing.assert_array_equal(numpy.rows(np.arange(outputs)), packed.rows(np.arange(outputs)))
    np.testing.assert_allclose(packed.linear(x), numpy.linear(x), rtol=0.05, atol=0.05 * np.abs(numpy.linear(x)).max())
    small = native.BlockMatrix(code, raw, outputs, inputs, native.WeightArena(64))  # too small: memory of its own
    np.testing.assert_array_equal(small.linear(x), packed.linear(x))


@pytest.mark.parametrize("change", [{"code": 99}, {"outputs": 3}, {"inputs": 100}, {"inputs": 0}, {"outputs": 2**40}])
def test_bytes_that_do_not_fit_the_shape_are_refused(change: dict[str, Any]) -> None:
    for make in (native.BlockMatrix, native.BlockRows):
        wrong = {"code": 8, "outputs": 2, "inputs": 64} | change
        with pytest.raises(ValueError, match=r"format|bytes|elements"):
            make(wrong["code"], random_bytes(8, 2, 64), wrong["outputs"], wrong["inputs"])


def test_scales_that_are_not_numbers_are_refused() -> None:
    raw = random_bytes(8, 2, 64)
    raw[1] = 0x7C
    with pytest.raises(ValueError, match="NaN or infinity"):
        native.BlockMatrix(8, raw, 2, 64)
    with pytest.raises(ValueError, match="NaN or infinity"):
        native.BlockMatrix.from_floats(np.full((2, 32), np.nan, np.float32))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_floats_are_rounded_to_eight_bits_at_any_magnitude(magnitude: float) -> None:
    weight = (np.random.default_rng(0).standard_normal((7, 70)) * magnitude).astype(np.float32)
    rows = native.BlockMatrix.from_floats(weight).rows(np.arange(7))
    assert np.abs(rows - weight).max() < np.abs(weight).max() / 200


def test_the_layers_take_and_give_tensors() -> None:
    raw = random_bytes(8, 6, 64)
    layer, table = (
        BlockLinear(native.BlockMatrix(8, raw, 6, 64), np.ones(6)),
        BlockEmbedding(native.BlockRows(8, raw, 6, 64)),
    )
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    np.testing.assert_allclose(layer(x).data, x @ layer.dequantize().T + 1, atol=0.5)
    np.testing.assert_array_equal(copy.deepcopy(layer)(x).data, layer(x).data)
    np.testing.assert_array_equal(copy.deepcopy(table)([[1, 5]]).data[0], layer.dequantize()[[1, 5]])
    assert layer.nbytes > 6 * 68
    with pytest.raises(ConfigurationError, match="outside"):
        table([6])
    with pytest.raises(ShapeError, match="takes"):
        layer(x[..., :5])
    with pytest.raises(GradientError, match="no gradient"):
        layer(Tensor(x, requires_grad=True))
