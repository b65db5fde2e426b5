"""Pruned weights stay zero in int8; sparse int8 products are exact integers; files are small and come back the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import Tensor, models, nn, no_grad
from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError, GradientError, ShapeError, TilewiseError
from tilewise.io import load_arrays, save
from tilewise.prune import MagnitudePruner, SparseInt8Linear, load_pruned, prune, save_pruned
from tilewise.quantize import QuantizedLinear, quantize, save_quantized

RNG = np.random.default_rng(0)
ISAS = native.supported_isas() if native is not None else []


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def sparse_bytes(rng: np.random.Generator, rows: int, columns: int, sparsity: float) -> np.ndarray:
    q = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    q[rng.random(q.shape) < sparsity] = 0
    return q


@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 400),
    batch=st.integers(0, 9),
    sparsity=st.sampled_from([0.0, 0.5, 0.7, 0.9, 0.99, 1.0]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def every_shape(rows: int, columns: int, batch: int, sparsity: float, threads: int, seed: int) -> None:
    tilewise.set_num_threads(threads)
    rng = np.random.default_rng(seed)
    q = sparse_bytes(rng, rows, columns, sparsity)
    kernel = native.SparseInt8Weights(q, np.ones(rows, np.float32), None)
    x = rng.integers(-128, 128, (batch, columns)).astype(np.int8)
    np.testing.assert_array_equal(kernel.sums(x), x.astype(np.int32) @ q.T.astype(np.int32))
    np.testing.assert_array_equal(kernel.to_dense(), q)


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize("isa", ISAS)
def test_sums_are_the_integers_of_the_reference_on_every_instruction_set(isa: str) -> None:
    before, threads = native.isa(), tilewise.get_num_threads()
    native.set_isa(isa)
    every_shape()
    native.set_isa(before)
    tilewise.set_num_threads(threads)


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
def test_the_largest_integers_do_not_overflow() -> None:
    q = np.full((3, 1024), -127, np.int8)
    x = np.full((2, 1024), -128, np.int8)
    kernel = native.SparseInt8Weights(q, np.ones(3, np.float32), None)
    assert (kernel.sums(x) == 127 * 128 * 1024).all()
    with pytest.raises(ValueError, match="32 bits"):
        native.SparseInt8Weights(np.zeros((1, 200_000), np.int8), np.ones(1, np.float32), None)


@pytest.mark.parametrize("isa", ISAS or ["none"])
def test_a_sparse_int8_layer_gives_what_the_dense_int8_layer_gives(isa: str) -> None:
    before = native.isa() if native is not None else None
    if native is not None:
        native.set_isa(isa)
    linear = nn.Linear(100, 70, rng=0)
    linear.weight.data[...] = MagnitudePruner().prune(linear.weight.data, 0.7)
    sparse, dense = SparseInt8Linear.from_dense(linear, always_sparse=True), QuantizedLinear.from_float(linear)
    assert abs(sparse.sparsity - 0.7) < 0.02
    np.testing.assert_array_equal(sparse.weights()[linear.weight.data == 0], 0)
    for shape in [(100,), (0, 100), (1, 100), (3, 100), (2, 5, 100), (40, 100)]:
        x = numbers(*shape)
        with no_grad():
            for activation in (None, "relu", "gelu"):
                expected = dense(np.atleast_2d(x), activation=activation).data.reshape(*shape[:-1], 70)
                np.testing.assert_allclose(sparse(x, activation=activation).data, expected, atol=1e-5, rtol=1e-5)
    if native is not None:
        native.set_isa(before)


def test_rows_of_zeros_and_of_odd_numbers_are_harmless() -> None:
    layer = SparseInt8Linear(sparse_bytes(RNG, 20, 33, 0.5), np.ones(20, np.float32), always_sparse=True)
    assert not layer(np.zeros((2, 33), np.float32)).data.any()
    x = numbers(1, 33)
    x[0, 3] = np.nan
    assert np.isfinite(layer(x).data).all()


def test_the_layer_chooses_and_says_so() -> None:
    layer = SparseInt8Linear(sparse_bytes(RNG, 64, 64, 0.9), np.full(64, 0.01, np.float32), numbers(64))
    for batch in (1, 30):
        layer(numbers(batch, 64))
    assert len(layer.explain()) == 2 and all(why.startswith(("sparse", "dense")) for why in layer.explain().values())


def test_layers_save_and_load_small(tmp_path) -> None:
    q = sparse_bytes(RNG, 256, 300, 0.7)
    layer = SparseInt8Linear(q, np.abs(numbers(256)), numbers(256))
    path = tmp_path / "layer.safetensors"
    layer.save(path)
    assert path.stat().st_size <= 0.13 * 4 * q.size
    again = SparseInt8Linear.load(path)
    np.testing.assert_array_equal(again.weights(), q)
    np.testing.assert_array_equal(again.scale, layer.scale)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for at in RNG.integers(0, 600, 3):
            damaged[at] = RNG.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            SparseInt8Linear.load(path)
        except TilewiseError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: SparseInt8Linear(np.zeros((2, 2)), np.ones(2)), ShapeError),
        (lambda: SparseInt8Linear(np.zeros((2, 2), np.int8), np.ones(3)), ShapeError),
        (lambda: SparseInt8Linear(np.zeros((2, 2), np.int8), np.ones(2))(np.ones((1, 3))), ShapeError),
        (lambda: SparseInt8Linear(np.zeros((2, 2), np.int8), np.ones(2))(Tensor(np.ones((1, 2)), True)), GradientError),
        (lambda: SparseInt8Linear.from_dense(nan_layer()), ConfigurationError),
        (lambda: load_pruned("nowhere"), TilewiseError),
    ],
)
def test_what_cannot_be_done_gets_a_sentence(call, error: type) -> None:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)


def nan_layer() -> nn.Linear:
    linear = nn.Linear(3, 2, rng=0)
    linear.weight.data[0, 0] = np.nan
    return linear


def pruned_and_quantized():
    pruned = prune(models.cnn().eval(), 0.7)
    batches = [numbers(32, 1, 8, 8) for _ in range(2)]
    return pruned, quantize(pruned, batches, max_error=None)  # int16 or float layers would not be small


def test_zeros_of_a_pruned_model_are_zeros_of_the_quantized_one(tmp_path) -> None:
    pruned, quantized = pruned_and_quantized()
    save_quantized(quantized, tmp_path / "model.safetensors")
    arrays, _ = load_arrays(tmp_path / "model.safetensors")
    weights = [array for array in arrays.values() if array.dtype in (np.int8, np.int16)]
    assert len(weights) == len(pruned.pruning.layers)
    for q, layer in zip(weights, pruned.pruning.layers, strict=True):
        assert q.size == layer.weights and np.count_nonzero(q == 0) >= layer.zeros


def test_a_pruned_quantized_model_is_small_on_disk_and_comes_back_the_same(tmp_path) -> None:
    _, quantized = pruned_and_quantized()
    path = tmp_path / "model.safetensors"
    save_pruned(quantized, path)
    save_quantized(quantized, tmp_path / "plain.safetensors")
    save(models.cnn(), tmp_path / "dense.safetensors")
    dense = (tmp_path / "dense.safetensors").stat().st_size
    assert path.stat().st_size <= 0.15 * dense
    assert path.stat().st_size < (tmp_path / "plain.safetensors").stat().st_size
    x = Tensor(numbers(7, 1, 8, 8))
    with no_grad():
        np.testing.assert_array_equal(np.asarray(load_pruned(path)(x)), np.asarray(quantized(x)))
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for at in RNG.integers(0, len(whole), 4):
            damaged[at] = RNG.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            load_pruned(path)
        except TilewiseError as error:
            assert "\n" not in str(error)
    with pytest.raises(FileFormatError):
        load_pruned(tmp_path / "plain.safetensors")
