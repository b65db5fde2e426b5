"""Batch-invariant mode: a row has the same bits for every number of rows, thread count and instruction set."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tilewise
from tilewise import Tensor, nn, no_grad
from tilewise._extension import native

if native is None:
    pytest.skip("the compiled kernels are not built", allow_module_level=True)

ROWS = 257
# Fewer than 64 outputs and 64 or more, sums in one part and in several.
WEIGHTS = [
    (1, 1),
    (1, 300),
    (3, 9),
    (5, 700),
    (16, 12),
    (33, 13),
    (66, 2100),
    (100, 37),
    (127, 800),
    (130, 2),
    (300, 64),
]


@pytest.fixture(params=native.supported_isas())
def isa(request):
    previous, threads = native.isa(), native.num_threads()
    native.set_isa(request.param)
    with tilewise.batch_invariant():
        yield request.param
    native.set_isa(previous)
    native.set_num_threads(threads)


def operands(n: int, k: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([n, k])
    x, w = rng.standard_normal((ROWS, k), np.float32), rng.standard_normal((k, n), np.float32)
    x = x if layout[0] == "n" else np.ascontiguousarray(x.T).T
    return x, w if layout[1] == "n" else np.ascontiguousarray(w.T).T


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_rows_of_products_have_the_same_bits_for_every_number_of_rows(isa: str, layout: str):
    for (n, k), threads in zip(WEIGHTS, itertools.cycle((1, 2, 3, 4)), strict=False):
        x, w = operands(n, k, layout)
        bias = np.linspace(-1, 1, n, dtype=np.float32)
        native.set_num_threads(1)
        whole = native.matmul(x, w, bias=bias, activation="relu")
        exact = np.maximum(x.astype(np.float64) @ w + bias, 0)
        assert np.abs(whole - exact).max() <= 1e-5 + 3e-6 * k
        native.set_num_threads(threads)
        for m in range(1, ROWS + 1):
            part = native.matmul(x[:m], w, bias=bias, activation="relu")
            assert np.array_equal(part, whole[:m]), (n, k, m)


def test_norms_and_attention_over_the_same_keys_are_invariant(isa: str):
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((ROWS, 100), np.float32))
    q, k, v = (rng.standard_normal((4, 2, 70, 32), np.float32) for _ in range(3))
    with no_grad():
        for norm in (nn.LayerNorm(100), nn.RMSNorm(100), nn.functional.softmax):
            whole = norm(x).data
            assert all(np.array_equal(norm(Tensor(x.data[:m])).data, whole[:m]) for m in range(1, ROWS))
        for threads in (1, 3):
            native.set_num_threads(threads)
            whole = attend(q, k, v)
            assert all(np.array_equal(attend(q[:b], k[:b], v[:b]), whole[:b]) for b in range(1, 4))
            assert all(np.array_equal(attend(q[:, :, :m], k, v), whole[:, :, :m]) for m in range(1, 70))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    data: np.ndarray = nn.functional.scaled_dot_product_attention(Tensor(q), Tensor(k), Tensor(v)).data
    return data


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_decoding_gives_the_same_logits_for_every_batch_and_division_of_a_prompt(isa: str, weights: str):
    from tilewise.generate import make_engine, new_cache

    model = nn.GPT(2, 96, 3, vocab=31, context=40, rng=3)
    tokens = np.random.default_rng(1).integers(0, 31, (3, 36))
    engine = make_engine(model, weights)

    def logits(steps: list[int], sequences: int, threads: int) -> np.ndarray:
        """Logits of the first sequence, computed with others and in chunks of so many tokens."""
        native.set_num_threads(threads)
        cache, start, chunks = new_cache(model, sequences), 0, []
        for count in steps:
            rows = [(tokens[s, p], s, p) for s in range(sequences) for p in range(start, start + count)]
            chunks.append(engine.run(np.array(rows), cache, np.arange(len(rows)))[:count])
            start += count
        return np.concatenate(chunks)

    whole = logits([36], 1, 1)
    for steps, sequences, threads in (([1] * 36, 1, 1), ([13, 1, 22], 1, 2), ([36], 3, 3), ([1] * 36, 3, 4)):
        assert np.array_equal(logits(steps, sequences, threads), whole), (steps, sequences)


def test_the_mode_is_off_at_first_and_ends_with_its_block():
    assert not tilewise.get_batch_invariant()
    with tilewise.batch_invariant():
        assert tilewise.get_batch_invariant()
        with tilewise.batch_invariant(False):
            assert not tilewise.get_batch_invariant()
    assert not tilewise.get_batch_invariant()
    tilewise.set_batch_invariant(True)
    tilewise.set_batch_invariant(False)
    assert not tilewise.get_batch_invariant()
