"""Exactness at full size: 200 greedy tokens with and without a cache, PyTorch's logits, and 1,000 generations. Slow."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import torch_models
from tilewise import models, no_grad
from tilewise._extension import native
from tilewise.generate import generate, make_engine, new_cache

pytestmark = pytest.mark.slow
SIZES = ["4x128", "6x384", "12x768"]
NEW = 200


def continued(model: object, prompts: list[np.ndarray]) -> np.ndarray:
    """Tokens (sequences, NEW), greedy, with the cache, all prompts together."""
    return np.stack(list(generate(model, prompts, NEW)), 1)


@pytest.mark.parametrize("size", SIZES)
def test_200_greedy_tokens_are_those_of_the_whole_model(size: str) -> None:
    """Fed the tokens that the cache led to, the model without one chooses each of them again: by induction it would
    have generated the same. One pass over the sequence gives the logits of all 200 steps."""
    model, rng = models.gpt(size, seed=7), np.random.default_rng(3)
    prompts = [rng.integers(0, 65, n) for n in (5, 40, 17)]
    together = continued(model, prompts)
    for prompt, tokens in zip(prompts, together, strict=True):
        sequence = np.concatenate([prompt, tokens])
        with no_grad():
            whole = model(sequence[None, :-1]).data[0]
        np.testing.assert_array_equal(whole[len(prompt) - 1 :].argmax(-1), tokens)
        np.testing.assert_array_equal(np.array(list(generate(model, prompt, NEW))), tokens)


@pytest.mark.parametrize("size", SIZES)
def test_cached_logits_are_the_models_and_pytorchs(size: str) -> None:
    model = models.gpt(size, seed=7)
    peer = torch_models.gpt(size)
    peer.load_state_dict({k: torch.from_numpy(np.asarray(v).copy()) for k, v in model.state_dict().items()})
    tokens = np.random.default_rng(4).integers(0, 65, 256)
    engine, cache = make_engine(model), new_cache(model, 1)
    stepped = [engine.run(np.array([[t, 0, i]]), cache, np.zeros(1, np.int64))[0] for i, t in enumerate(tokens)]
    with no_grad():
        whole = model(tokens[None]).data[0]
    with torch.no_grad():
        theirs = peer.eval()(torch.from_numpy(tokens[None])).numpy()[0]
    largest = max(1.0, float(np.abs(whole).max()))
    assert np.abs(np.stack(stepped) - whole).max() <= 1e-5 * largest
    assert np.abs(np.stack(stepped) - theirs).max() <= 1e-4 * largest


def test_tokens_of_generation_without_a_cache_are_equal_token_by_token() -> None:
    model, rng = models.gpt("4x128", seed=9), np.random.default_rng(5)
    prompts = [rng.integers(0, 65, n) for n in (1, 30)]
    plain = np.stack(list(generate(model, prompts, NEW, use_cache=False)), 1)
    np.testing.assert_array_equal(continued(model, prompts), plain)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_1000_generations_leak_nothing(weights: str) -> None:
    if native is None:
        pytest.skip("the compiled kernels are not built")
    model = models.gpt("4x128")

    def run(times: int) -> None:
        for i in range(times):
            list(generate(model, [[1, 2], [3]], 4, weights=weights, temperature=0.5, seed=i, cache_dtype="int8"))

    run(100)
    gc.collect()
    native_bytes, resident = native.memory_in_use(), _resident_bytes()
    run(1000)
    gc.collect()
    assert native.memory_in_use() == native_bytes
    assert _resident_bytes() - resident < 1 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
