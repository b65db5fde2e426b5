"""Shared by the generation benchmarks: GPT-2's shape with random weights, and perplexity on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.generate import make_engine, new_cache
from tilewise.nn import GPT

CONTEXT, PROMPT = 512, 256
SIZES = {"gpt 12x768": 65, "gpt-2": 50257}  # tokens of the vocabulary; the first has 85 million parameters


def gpt(vocabulary: int) -> GPT:
    return GPT(12, 768, 12, vocabulary, CONTEXT, rng=0, approximate="tanh")


def rows_of(tokens: Any) -> Any:
    """One sequence from position 0 on, as an engine reads it."""
    return np.stack([tokens, np.zeros_like(tokens), np.arange(len(tokens))], 1)


def perplexity(logits_of: Callable[[Any], Any], ids: Any, context: int) -> float:
    """Return the perplexity over whole windows of the text, for every token after the first of a window."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - context - 1, context):
        window = ids[start : start + context + 1]
        logits = np.asarray(logits_of(window[:-1]), np.float64)
        logits -= logits.max(-1, keepdims=True)
        log_probabilities = logits[np.arange(context), window[1:]] - np.log(np.exp(logits).sum(-1))
        total, count = total - float(log_probabilities.sum()), count + context
    return float(np.exp(total / count))


def logits_of(model: Any, weights: str) -> Callable[[Any], Any]:
    """The model's logits of a text, with its weights in this form."""
    engine, cache = make_engine(model, weights), new_cache(model, 1)
    return lambda ids: engine.run(rows_of(ids), cache, np.arange(len(ids)))
