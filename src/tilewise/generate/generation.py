"""`generate`: yield tokens one after the other.

With the cache, the prompt is computed once and each new token costs one position. Without it (`use_cache=False`) each
token recomputes the whole sequence; the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise._wording import pluralize
from tilewise.errors import ConfigurationError, ShapeError, type_name
from tilewise.generate.cache import KVCache, is_integer
from tilewise.generate.engine import LanguageModel, head_shape, make_engine, new_cache
from tilewise.nn import GPT
from tilewise.nn.decoder_config import LlamaConfig
from tilewise.nn.self_planning import layer_by_layer
from tilewise.tensor import Array, no_grad

NextLogits = Callable[[Array], Array]  # maps the previous tokens (B,) to logits (B, vocabulary)
END_OF_SEQUENCE = -1


def generate(
    model: LanguageModel,
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
    cached_tokens: int = 0,
) -> Iterator[Any]:
    """Yield up to `max_new_tokens` new token ids after `prompt`, each as soon as it is computed.

    A prompt of several sequences (of any lengths) yields arrays with one id per sequence. A sequence that has produced
    a `stop` token gives -1 from then on, and generation ends when all have. The stop token itself is yielded.
    `weights="int8"` or `"int4"` decodes with quantized copies of the weights; `cache_dtype` stores keys and values in
    float16 or int8. The first `cached_tokens` of the prompt are not computed again: `cache` holds them from an earlier
    call, as in a conversation. A model from `quantize(model, bits=4)` decodes with its own INT4 weights.

    >>> from tilewise import models
    >>> len(list(generate(models.gpt("4x128"), [1, 2, 3], 5)))
    5
    """
    if not isinstance(model, GPT) and not isinstance(getattr(model, "config", None), LlamaConfig):
        raise ConfigurationError(f"generate needs a tilewise.nn.GPT or Llama, not a {type_name(model)}")
    prompts, single = _checked_prompts(model, prompt)
    sampler = Sampler(temperature, top_k, top_p)
    for name, value in (("max_new_tokens", max_new_tokens), ("seed", seed), ("cached_tokens", cached_tokens)):
        if not is_integer(value) or value < 0:
            raise ConfigurationError(f"{name} must be an integer of at least 0, not {value!r}")
    stops = _checked_stops(stop)
    prompt_length = max(len(p) for p in prompts)
    positions = prompt_length + max_new_tokens - 1  # the last token is yielded but not fed back
    if positions > model.context:
        raise ShapeError(
            f"a prompt of {pluralize(prompt_length, 'token')} and {max_new_tokens} new ones do not fit into the "
            f"model's context of {model.context}"
        )
    if use_cache:
        cache = new_cache(model, len(prompts), max(1, positions), cache_dtype) if cache is None else cache
        _check_cache(cache, model, len(prompts), positions)
        if cached_tokens > min(int(cache.lengths.min()), min(map(len, prompts)) - 1):
            raise ShapeError(f"the cache does not hold {cached_tokens} tokens of a prompt that is longer")
        cache.truncate(cached_tokens)
        next_logits = _cached(model, prompts, cache, weights, cached_tokens)
    else:
        if weights != "float32":
            raise ConfigurationError(f"{weights} weights need use_cache=True")
        if cache is not None:
            raise ConfigurationError("a cache needs use_cache=True")
        next_logits = _uncached(model, prompts)
    rng, running = np.random.default_rng(seed), np.ones(len(prompts), bool)

    def new_tokens() -> Iterator[Any]:
        """Yield the next token of every sequence until all have produced a stop token."""
        tokens = np.empty(0, np.int64)  # empty: the first call computes the prompts
        for _ in range(max_new_tokens):
            tokens = sampler.pick(next_logits(tokens), rng)
            yield int(tokens[0]) if single else np.where(running, tokens, END_OF_SEQUENCE)
            if stops:
                running[np.isin(tokens, list(stops))] = False
                if not running.any():
                    return

    return new_tokens()


def _cached(model: LanguageModel, prompts: list[Array], cache: KVCache, weights: str, start: int) -> NextLogits:
    """Return a function that computes the next logits with a cache; its first `start` positions are filled already."""
    engine = make_engine(model, weights)
    lengths = np.array([len(p) for p in prompts])
    batch = np.arange(len(prompts))

    def next_logits(tokens: Array) -> Array:
        """Append one token per sequence, or the prompts at first, and return the logits after them."""
        if tokens.size == 0:  # first call: prefill all prompts in one batch of rows, without padding
            sequence = np.repeat(batch, lengths - start)
            position = np.concatenate([np.arange(start, n) for n in lengths])
            rows = np.stack([np.concatenate([p[start:] for p in prompts]), sequence, position], 1)
            return engine.run(rows, cache, np.cumsum(lengths - start) - 1)
        rows = np.stack([tokens, batch, lengths], 1)
        lengths[:] += 1
        return engine.run(rows, cache, batch)

    return next_logits


def _uncached(model: LanguageModel, prompts: list[Array]) -> NextLogits:
    """Return a function that computes the next logits by running whole sequences again."""
    sequences = [list(p) for p in prompts]

    def next_logits(tokens: Array) -> Array:
        """Append one token per sequence and run all sequences from their start."""
        for sequence, token in zip(sequences, tokens, strict=False):
            sequence.append(token)
        with no_grad(), layer_by_layer():  # every token is another shape
            # Sequences of equal length run as one batch; others run one by one, because the model has no padding.
            if len({len(s) for s in sequences}) == 1:
                logits: Array = model(np.array(sequences)).data[:, -1]
                return logits
            return np.stack([model(np.array([s])).data[0, -1] for s in sequences])

    return next_logits


def _checked_prompts(model: LanguageModel, prompt: Any) -> tuple[list[Array], bool]:
    """Convert a prompt to token id arrays, one per sequence, and whether it was a single sequence."""
    if isinstance(prompt, str):
        raise ConfigurationError(
            "a prompt must be a sequence of token ids; encode the text first (data.encode(text) for the shipped gpt)"
        )
    try:
        rows = list(np.asarray(prompt) if hasattr(prompt, "__array__") else prompt)
    except TypeError:
        raise ConfigurationError(f"a prompt must be a sequence of token ids, not {prompt!r}") from None
    single = not rows or np.ndim(rows[0]) == 0
    prompts = [np.asarray(row) for row in ([rows] if single else rows)]
    for tokens in prompts:
        if tokens.ndim != 1:
            raise ShapeError("a prompt must be one row of token ids, or a list of such rows")
        if tokens.size == 0:
            raise ShapeError("a prompt must contain at least one token id")
        if tokens.dtype.kind not in "iu":
            raise ConfigurationError(f"token ids must be integers, not {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= model.vocab:
            invalid = tokens[(tokens < 0) | (tokens >= model.vocab)][0]
            raise ShapeError(f"token {invalid} is outside the model's vocabulary of {model.vocab}")
        if tokens.size > model.context:
            raise ShapeError(f"a prompt of {tokens.size} tokens is longer than the model's context of {model.context}")
    return [tokens.astype(np.int64) for tokens in prompts], single


def _checked_stops(stop: Any) -> frozenset[int]:
    """Convert a stop token, a list of them, or None to a set of token ids; raise if one is invalid."""
    several = isinstance(stop, set | frozenset) or np.ndim(stop) > 0
    stops = list(stop) if several else [] if stop is None else [stop]
    if not all(is_integer(s) for s in stops):
        raise ConfigurationError(f"stop must be a token id or several, not {stop!r}")
    return frozenset(int(s) for s in stops)


def _check_cache(cache: KVCache, model: LanguageModel, batch: int, positions: int) -> None:
    """Raise an error unless the cache fits the model, the batch and the number of positions."""
    if not isinstance(cache, KVCache):
        raise ConfigurationError(f"cache must be a KVCache, not a {type(cache).__name__}")
    expected = (len(model.blocks), batch, *head_shape(model))
    actual = (cache.n_layers, cache.batch_size, cache.n_heads, cache.head_dim)
    if expected != actual:
        raise ShapeError(
            f"this model and prompt need a cache of (layers, batch, heads, head width) {expected}, not {actual}"
        )
    if cache.overflow != "error":
        raise ConfigurationError('generation needs a cache with overflow="error", because positions are absolute')
    if cache.max_seq_len < positions:
        raise ShapeError(
            f"this prompt and its new tokens need {positions} positions; the cache has {cache.max_seq_len}"
        )


# --- sampling ---


def _is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float | np.floating)


@dataclass(frozen=True)
class Sampler:
    """Sampling settings. `temperature` 0 takes the most likely token (greedy decoding).

    Otherwise tokens are sampled from the `top_k` most likely ones, and among those from the smallest set whose
    probabilities add up to `top_p` (nucleus sampling, Holtzman et al. 2020).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not np.isfinite(self.temperature) or self.temperature < 0:
            raise ConfigurationError(f"temperature must be 0 (greedy) or positive, not {self.temperature!r}")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            raise ConfigurationError(f"top_k must be an integer of at least 1, not {self.top_k!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigurationError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")

    def pick(self, logits: Array, rng: np.random.Generator) -> Array:
        """Choose a token id for each row of logits (B, vocabulary), greedily or at random: (B,)."""
        if np.isnan(logits).any():
            raise ConfigurationError("the logits are NaN; the model's weights contain NaN or infinity")
        if self.temperature == 0:
            greedy: Array = logits.argmax(-1)
            return greedy
        return np.array([self._sample(row, rng) for row in logits], np.int64)

    def _sample(self, logits: Array, rng: np.random.Generator) -> int:
        """Draw a token from the softmax of the logits after temperature, top-k and top-p."""
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64) / self.temperature
        probability = np.exp(scaled - scaled[0])
        probability /= probability.sum()
        if self.top_p is not None:
            count = int(np.searchsorted(np.cumsum(probability), self.top_p)) + 1
            order, probability = order[:count], probability[:count] / probability[:count].sum()
        return int(rng.choice(order, p=probability))
