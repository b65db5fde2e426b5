"""`generate`: tokens one after the other, as they come.

With the cache, the prompt is computed once and each new token costs one position. Without it (`use_cache=False`) every
token costs the whole sequence again: the same tokens, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, ShapeError
from tilewise.generate.cache import KVCache
from tilewise.generate.engine import make_engine, new_cache
from tilewise.generate.sampling import Sampler
from tilewise.nn import GPT
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
NextLogits = Callable[[Array], Array]  # the tokens added last, one per sequence, to logits (B, vocabulary)
FINISHED = -1


def generate(
    model: GPT,
    prompt: Sequence[int] | Sequence[Sequence[int]] | Array,
    max_new_tokens: int,
    use_cache: bool = True,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | Iterable[int] | None = None,
    weights: str = "float32",
    cache_dtype: str = "float32",
    cache: KVCache | None = None,
) -> Iterator[Any]:
    """Yield `max_new_tokens` new token ids after `prompt`, each as soon as it is known.

    A prompt of several sequences (of any lengths) yields an array with one id per sequence and step; a sequence that
    has met a `stop` token gives -1 from then on, and generation ends when all have. The stop token itself is yielded.
    `weights="int8"` decodes with int8 weights, `cache_dtype` stores keys and values in float16 or int8.

    >>> from tilewise import models
    >>> len(list(generate(models.gpt("4x128"), [1, 2, 3], 5)))
    5
    """
    prompts, single = _checked_prompts(model, prompt)
    sampler = Sampler(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ConfigurationError(f"max_new_tokens cannot be negative, as {max_new_tokens} is")
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens > model.context + 1:  # the last token is yielded, not fed back
        raise ShapeError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the model's context of "
            f"{model.context}"
        )
    if use_cache:
        cache = cache or new_cache(model, len(prompts), dtype=cache_dtype)
        _check_cache(cache, model, len(prompts))
        next_logits = _cached(model, prompts, cache, weights)
    else:
        if weights != "float32":
            raise ConfigurationError("generation without a cache uses the model's own float32 weights")
        next_logits = _uncached(model, prompts)
    stops = frozenset([stop] if isinstance(stop, int | np.integer) else stop or ())
    return _steps(next_logits, sampler, max_new_tokens, stops, np.random.default_rng(seed), len(prompts), single)


def _steps(
    next_logits: NextLogits,
    sampler: Sampler,
    count: int,
    stops: frozenset[int],
    rng: np.random.Generator,
    batch: int,
    single: bool,
) -> Iterator[Any]:
    tokens = np.empty(0, np.int64)
    running = np.ones(batch, bool)
    for _ in range(count):
        tokens = sampler.pick(next_logits(tokens), rng)
        yield int(tokens[0]) if single else np.where(running, tokens, FINISHED)
        if stops:
            running &= ~np.isin(tokens, list(stops))
            if not running.any():
                return


def _cached(model: GPT, prompts: list[Array], cache: KVCache, weights: str) -> NextLogits:
    engine = make_engine(model, weights)
    cache.reset()
    lengths = np.array([len(p) for p in prompts])
    batch = np.arange(len(prompts))

    def next_logits(tokens: Array) -> Array:
        if tokens.size == 0:
            sequence = np.repeat(batch, lengths)
            position = np.concatenate([np.arange(n) for n in lengths])
            rows = np.stack([np.concatenate(prompts), sequence, position], 1)
            return engine.run(rows, cache, np.cumsum(lengths) - 1)
        rows = np.stack([tokens, batch, lengths], 1)
        lengths[:] += 1
        return engine.run(rows, cache, batch)

    return next_logits


def _uncached(model: GPT, prompts: list[Array]) -> NextLogits:
    sequences = [list(p) for p in prompts]

    def next_logits(tokens: Array) -> Array:
        for sequence, token in zip(sequences, tokens, strict=False):
            sequence.append(token)
        with no_grad():
            if len({len(s) for s in sequences}) == 1:
                logits: Array = model(np.array(sequences)).data[:, -1]
                return logits
            return np.stack([model(np.array([s])).data[0, -1] for s in sequences])

    return next_logits


def _checked_prompts(model: GPT, prompt: Any) -> tuple[list[Array], bool]:
    if isinstance(prompt, str):
        raise ConfigurationError("a prompt is a sequence of token ids; encode the text first")
    rows = list(prompt)
    single = not rows or np.ndim(rows[0]) == 0
    prompts = [np.asarray(row) for row in ([rows] if single else rows)]
    for tokens in prompts:
        if tokens.ndim != 1 or tokens.size == 0:
            raise ShapeError("a prompt must hold at least one token id")
        if tokens.dtype.kind not in "iu":
            raise ConfigurationError(f"token ids are integers, not {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= model.vocab:
            bad = tokens[(tokens < 0) | (tokens >= model.vocab)][0]
            raise ShapeError(f"token {bad} is outside the model's vocabulary of {model.vocab}")
        if tokens.size > model.context:
            raise ShapeError(f"a prompt of {tokens.size} tokens is longer than the model's context of {model.context}")
    return [tokens.astype(np.int64) for tokens in prompts], single


def _check_cache(cache: KVCache, model: GPT, batch: int) -> None:
    wanted = (len(model.blocks), batch, model.heads, model.token_embedding.weight.shape[1] // model.heads)
    given = (cache.n_layers, cache.batch_size, cache.n_heads, cache.head_dim)
    if wanted != given:
        raise ShapeError(
            f"this model and prompt need a cache of (layers, batch, heads, head width) {wanted}, not {given}"
        )
    if cache.overflow != "error":
        raise ConfigurationError("generation needs a cache that refuses to overflow, since positions are learned")
