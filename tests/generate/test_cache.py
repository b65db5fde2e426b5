"""KVCache: what is stored comes back, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import Tensor, no_grad
from tilewise.errors import ConfigurationError, DtypeError, ShapeError
from tilewise.generate import CachedAttention, KVCache

RNG = np.random.default_rng(0)


def rows(batch: int = 2, heads: int = 3, steps: int = 4, width: int = 8) -> np.ndarray:
    return RNG.standard_normal((batch, heads, steps, width)).astype(np.float32)


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 0.0), ("float16", 2e-3), ("int8", 2e-2)])
def test_what_is_stored_comes_back(kind: str, tolerance: float) -> None:
    cache = KVCache(16, 3, 8, dtype=kind)
    stored = {}
    for layer in (1, 0):
        key, value = rows(steps=7), rows(steps=7)
        cache.update(layer, key[:, :, :5], value[:, :, :5], 0)
        cache.update(layer, key[:, :, 5:], value[:, :, 5:], 5)
        stored[layer] = key, value
    for layer, (key, value) in stored.items():
        for positions in (7, slice(0, 7), np.arange(7)):
            got_key, got_value = cache.get(layer, positions)
            assert np.abs(got_key - key).max() <= tolerance * np.abs(key).max()
            assert np.abs(got_value - value).max() <= tolerance * np.abs(value).max()
        np.testing.assert_array_equal(cache.get(layer, [6, 2])[0], cache.get(layer, 7)[0][:, :, [6, 2]])


@pytest.mark.parametrize(("kind", "size"), [("float32", 4), ("float16", 2), ("int8", 1)])
def test_the_cache_takes_exactly_what_its_shape_says(kind: str, size: int) -> None:
    cache = KVCache(64, 4, 16, n_layers=3, batch_size=2, dtype=kind)
    scales = 2 * 3 * 2 * 4 * 64 * 4 if kind == "int8" else 0
    assert cache.nbytes == 2 * 3 * 2 * 4 * 64 * 16 * size + scales


def test_sequences_may_start_at_different_positions() -> None:
    cache = KVCache(16, 3, 8)
    key = rows()
    cache.update(0, key, key, np.array([0, 5]))
    np.testing.assert_array_equal(cache.lengths[0], [4, 9])
    np.testing.assert_array_equal(cache.get(0, slice(5, 9))[0][1], key[1])


def test_a_full_cache_refuses_and_says_what_to_do() -> None:
    cache = KVCache(4, 3, 8)
    cache.update(0, rows(), rows(), 0)
    with pytest.raises(ShapeError, match="does not fit into a cache of 4 positions"):
        cache.update(0, rows(steps=1), rows(steps=1), 4)


def test_a_sliding_cache_keeps_the_latest_positions() -> None:
    cache = KVCache(4, 3, 8, overflow="slide")
    key = rows(steps=11)
    for position in range(11):
        cache.update(0, key[:, :, position : position + 1], key[:, :, position : position + 1], position)
    np.testing.assert_array_equal(cache.get(0, slice(7, 11))[0], key[:, :, 7:])
    with pytest.raises(ShapeError, match="has positions 7 to 10"):
        cache.get(0, slice(6, 11))


def test_attention_over_a_sliding_cache_sees_the_window_only() -> None:
    attention = CachedAttention(8, 2, rng=1)
    x = Tensor(RNG.standard_normal((1, 10, 8)).astype(np.float32))
    window = 4
    with no_grad():
        allowed = np.tril(np.ones((10, 10), bool)) & ~np.tril(np.ones((10, 10), bool), -window)
        expected = attention(x, mask=allowed).data
        for cuts in ([10], [3, 7], [1] * 10, [4, 1, 5]):
            cache, parts, at = KVCache(window, 2, 4, overflow="slide"), [], 0
            for steps in cuts:
                parts.append(attention(x[:, at : at + steps], cache.layer(0)).data)
                at += steps
            np.testing.assert_allclose(np.concatenate(parts, 1), expected, atol=1e-6)


def test_reset_truncate_and_fork() -> None:
    cache = KVCache(8, 3, 8, dtype="int8")
    cache.update(0, rows(), rows(), 0)
    forked = cache.fork(3)
    assert forked.batch_size == 6
    np.testing.assert_array_equal(forked.get(0, 4)[0][2], cache.get(0, 4)[0][0])
    forked.update(0, rows(6, steps=1), rows(6, steps=1), 4)
    assert cache.lengths.max() == 4
    cache.truncate(2)
    with pytest.raises(ShapeError, match="has 2"):
        cache.get(0, 3)
    cache.reset()
    assert cache.get(0, 0)[0].shape == (2, 3, 0, 8)


def test_bad_arguments_get_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match="max_seq_len"):
        KVCache(0, 1, 1)
    with pytest.raises(ConfigurationError, match="float32, float16 or int8"):
        KVCache(1, 1, 1, dtype="float64")
    with pytest.raises(ConfigurationError, match="overflow"):
        KVCache(1, 1, 1, overflow="grow")
    cache = KVCache(8, 3, 8)
    with pytest.raises(ShapeError, match=r"\(batch, 3, positions, 8\)"):
        cache.update(0, rows(heads=2), rows(heads=2), 0)
    with pytest.raises(DtypeError, match="floating point"):
        cache.update(0, np.zeros((1, 3, 1, 8), int), np.zeros((1, 3, 1, 8), int), 0)
    cache.update(0, rows(), rows(), 0)
    with pytest.raises(ShapeError, match="2 sequences, not 1"):
        cache.update(0, rows(1), rows(1), 0)
    with pytest.raises(ShapeError, match="stored for layer 5"):
        cache.get(5, 1)
    with pytest.raises(ShapeError, match="negative"):
        cache.update(0, rows(), rows(), -1)


@pytest.mark.parametrize(
    "odd",
    [
        lambda c: KVCache(4, 2, 2, batch_size=-1),
        lambda c: KVCache(4, 2, 2, n_layers=1.5),
        lambda c: KVCache(10**9, 64, 64, n_layers=100, batch_size=100),
        lambda c: c.update("a", rows(), rows(), 0),
        lambda c: c.update(0, rows(), rows(), 1.5),
        lambda c: c.update(0, rows(), rows(), np.array([0, 1, 2])),
        lambda c: c.get(0, "a"),
        lambda c: c.get(0, np.array([0.5])),
        lambda c: c.get(0, np.array([[0]])),
        lambda c: c.get(0, np.array([True])),
        lambda c: c.fork("a"),
        lambda c: c.truncate("a"),
        lambda c: c.sequence(3, 0),
    ],
)
def test_odd_uses_get_a_sentence_and_change_nothing(odd) -> None:
    cache = KVCache(8, 3, 8)
    key = rows()
    cache.update(0, key, key, 0)
    with pytest.raises((ConfigurationError, ShapeError)):
        odd(cache)
    np.testing.assert_array_equal(cache.get(0, 4)[0], key)
