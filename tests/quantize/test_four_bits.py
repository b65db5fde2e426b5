"""Four-bit weights: the same numbers on every instruction set, small errors at every magnitude, a GPT as good."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import Tensor, data, models, nn, no_grad
from tilewise._extension import native
from tilewise.errors import ConfigurationError, GradientError, ShapeError
from tilewise.generate import generate, make_engine, new_cache
from tilewise.generate.engine import ModelEngine
from tilewise.nn import GPT
from tilewise.quantize import FourBitLinear, quantize
from tilewise.quantize.four_bits import NumpyInt4Weights, quantize_row_blocks
from tilewise.quantize.four_bits.blocks import Blocks, round_blocks

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
ISAS = ["portable", "avx2", "avx512"]


@pytest.fixture
def every_isa() -> Iterator[list[str]]:
    assert native is not None
    before = native.isa()
    yield [isa for isa in ISAS if _usable(isa)]
    native.set_isa(before)


def _usable(isa: str) -> bool:
    assert native is not None
    try:
        native.set_isa(isa)
    except ValueError:
        return False
    return True


def random_blocks(rng: np.random.Generator, outputs: int, inputs: int, symmetric: bool) -> Blocks:
    return round_blocks(rng.standard_normal((outputs, inputs)).astype(np.float32), symmetric)


def parts(blocks: Blocks) -> tuple[Any, ...]:
    return blocks.codes, blocks.scales, blocks.minimums, blocks.column_scale


@needs_native
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 40), st.integers(1, 200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_products_are_the_same_floats_on_every_instruction_set_and_in_numpy(
    seed: int, rows: int, outputs: int, inputs: int, symmetric: bool
) -> None:
    assert native is not None
    rng = np.random.default_rng(seed)
    blocks = random_blocks(rng, outputs, inputs, symmetric)
    x = (rng.standard_normal((rows, inputs)) * 10.0 ** rng.integers(-20, 20)).astype(np.float32)
    expected = NumpyInt4Weights(*parts(blocks)).linear(x)
    packed, before = native.BlockMatrix.from_codes(*parts(blocks)), native.isa()
    try:
        for isa in filter(_usable, ISAS):
            for mine, theirs in zip(native.quantize_row_blocks(x), quantize_row_blocks(x), strict=True):
                np.testing.assert_array_equal(mine, theirs, isa)
            np.testing.assert_array_equal(packed.linear(x), expected, isa)
    finally:
        native.set_isa(before)


@needs_native
def test_codes_at_their_ends_do_not_overflow(every_isa: list[str]) -> None:
    assert native is not None
    shape, ends = (16, 64), np.float16(60000)
    x = np.full((1, 64), 3.0, np.float32)
    for code in (0, 15):
        blocks = (np.full(shape, code, np.uint8), np.full((16, 2), ends), None, np.ones(16, np.float32))
        for isa in every_isa:
            native.set_isa(isa)
            expected = NumpyInt4Weights(*blocks).linear(x)
            np.testing.assert_array_equal(native.BlockMatrix.from_codes(*blocks).linear(x), expected, isa)


@needs_native
def test_strange_inputs_give_what_numpy_gives(every_isa: list[str]) -> None:
    assert native is not None
    blocks = parts(random_blocks(np.random.default_rng(0), 5, 70, True))
    x = np.ones((4, 70), np.float32)
    x[0, 3], x[1, 40], x[2, :], x[3, 69] = np.nan, 1e-44, 0, -3e38
    expected = NumpyInt4Weights(*blocks).linear(x)
    for isa in every_isa:
        native.set_isa(isa)
        np.testing.assert_array_equal(native.BlockMatrix.from_codes(*blocks).linear(x), expected, isa)


@needs_native
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 33), (5, 100)])
def test_unpacking_gives_back_what_was_packed(shape: tuple[int, int], symmetric: bool) -> None:
    assert native is not None
    blocks = random_blocks(np.random.default_rng(1), *shape, symmetric)
    for array, expected_array in zip(
        native.BlockMatrix.from_codes(*parts(blocks)).unpack(), parts(blocks), strict=True
    ):
        np.testing.assert_array_equal(array, expected_array)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("magnitude", [1e-37, 1e-9, 1.0, 1e30])
def test_every_magnitude_of_weights_keeps_its_precision(magnitude: float, symmetric: bool) -> None:
    weight = (np.random.default_rng(2).standard_normal((8, 96)) * magnitude).astype(np.float32)
    error = round_blocks(weight, symmetric).dequantize() - weight
    assert np.linalg.norm(error / magnitude) < 0.12 * np.linalg.norm(weight / magnitude)


def test_weights_on_a_four_bit_grid_keep_their_values() -> None:
    once = random_blocks(np.random.default_rng(3), 9, 128, True)
    np.testing.assert_array_equal(round_blocks(once.dequantize()).dequantize(), once.dequantize())


def test_weights_without_a_number_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="NaN or infinity"):
        round_blocks(np.array([[1.0, np.nan]], np.float32))


def test_moments_of_the_inputs_make_the_outputs_better() -> None:
    rng = np.random.default_rng(4)
    mix = rng.standard_normal((64, 64)) * rng.uniform(0.05, 2, 64)
    x = (rng.standard_normal((500, 64)) @ mix).astype(np.float32)
    weight = rng.standard_normal((32, 64)).astype(np.float32)
    errors = [
        np.linalg.norm(x @ (round_blocks(weight, True, m).dequantize() - weight).T) for m in (None, x.T @ x / len(x))
    ]
    assert errors[1] < 0.8 * errors[0]


def test_an_mlp_in_four_bits_gives_close_outputs_and_keeps_no_float_weights() -> None:
    model, rng = models.mlp(), np.random.default_rng(5)
    x = rng.random((32, 64), dtype=np.float32)
    small = quantize(model, [x], bits=4)
    with no_grad():
        expected, output = model(Tensor(x)).data, small(Tensor(x)).data
    assert np.abs(output - expected).max() < 0.1 * np.abs(expected).max()
    layers = [m for m in small.modules() if isinstance(m, FourBitLinear)]
    assert len(layers) == sum(isinstance(m, nn.Linear) for m in model.modules())
    assert not any(isinstance(m, nn.Linear) for m in small.modules())
    floats = sum(m.weight.data.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    assert sum(m.nbytes for m in layers) < 0.2 * floats


def test_a_copy_of_a_four_bit_model_gives_the_same() -> None:
    x = np.random.default_rng(6).random((4, 64), dtype=np.float32)
    small = quantize(models.mlp(), bits=4)
    with no_grad():
        np.testing.assert_array_equal(copy.deepcopy(small)(Tensor(x)).data, small(Tensor(x)).data)


def test_what_four_bits_cannot_do_is_one_sentence() -> None:
    small, x = quantize(models.mlp(), bits=4), Tensor(np.zeros((1, 64), np.float32), requires_grad=True)
    with pytest.raises(GradientError, match="no gradient"):
        small(x)
    with pytest.raises(ShapeError, match="64"), no_grad():
        small(Tensor(np.zeros((1, 63), np.float32)))
    with pytest.raises(ConfigurationError, match="already"):
        quantize(small, bits=4)
    with pytest.raises(ConfigurationError, match="empty"):
        quantize(models.mlp(), [], bits=4)
    with pytest.raises(ConfigurationError, match="no linear layer"):
        quantize(nn.Sequential(nn.ReLU()), bits=4)
    with pytest.raises(ConfigurationError, match="bits"):
        quantize(models.mlp(), bits=3)
    with pytest.raises(ConfigurationError, match="calibration data"):
        quantize(models.mlp())


# --- GPT ---


def perplexity(model: GPT, ids: Any, context: int = 256, rows: int = 16) -> float:
    x = np.stack([ids[i * context : (i + 1) * context + 1] for i in range(rows)])
    with no_grad():
        logits = model(x[:, :-1]).data.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_probabilities = np.take_along_axis(logits, x[:, 1:, None], 2)[..., 0] - np.log(np.exp(logits).sum(-1))
    return float(np.exp(-log_probabilities.mean()))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_trained_gpt_keeps_its_perplexity_on_text_it_has_not_seen(symmetric: bool) -> None:
    model, text = models.pretrained("gpt"), data.text()
    calibration = [text.train[i * 50_000 :][: 8 * 256].reshape(8, 256) for i in range(4)]
    small: Any = quantize(model, calibration, bits=4, symmetric=symmetric)
    assert perplexity(small, text.valid) < 1.02 * perplexity(model, text.valid)


@needs_native
@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_the_decoder_and_the_layers_of_a_four_bit_gpt_agree(cache_dtype: str) -> None:
    model: Any = quantize(GPT(2, 48, 3, vocab=31, context=40, rng=3), bits=4)
    rows = np.stack([np.arange(9) % 31, np.zeros(9, int), np.arange(9)], 1)
    logits = []
    for engine in (make_engine(model), ModelEngine(model)):
        cache = new_cache(model, 1, dtype=cache_dtype)
        logits.append(engine.run(rows, cache, np.arange(9)))
        logits[-1] = np.concatenate([logits[-1], engine.run(np.array([[5, 0, 9]]), cache, np.zeros(1, np.int64))])
    np.testing.assert_allclose(logits[0], logits[1], atol=0.05 if cache_dtype == "int8" else 5e-3)


@needs_native
def test_a_batch_of_prompts_in_four_bits_gives_what_each_prompt_gives() -> None:
    model = GPT(2, 64, 4, vocab=31, context=64, rng=3)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    together = np.array(list(generate(model, prompts, 20, weights="int4")))
    for i, prompt in enumerate(prompts):
        assert list(generate(model, prompt, 20, weights="int4")) == list(together[:, i])


@needs_native
def test_four_bits_generate_like_a_model_quantized_without_data() -> None:
    model = GPT(2, 64, 4, vocab=31, context=64, rng=3)
    small: Any = quantize(model, bits=4)
    assert list(generate(model, [1, 2], 30, weights="int4")) == list(generate(small, [1, 2], 30))
    with pytest.raises(ConfigurationError, match="need a float32 model"):
        list(generate(small, [1, 2], 3, weights="int8"))


@needs_native
def test_four_bit_weights_take_a_seventh_of_the_memory() -> None:
    model = GPT(2, 128, 4, vocab=64, context=64)
    sizes = [make_engine(model, weights).weight_bytes for weights in ("float32", "int8", "int4")]  # type: ignore[attr-defined]
    assert sizes[1] == sizes[0] * 17 / 64  # 34 bytes for 32 weights
    assert sizes[2] < sizes[0] / 7
