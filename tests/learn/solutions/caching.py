"""Answers to the exercises on KV caching."""

import numpy as np


def attend(query, keys, values):
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values


def store(keys, values, key, value, position):
    keys[position], values[position] = key, value
    return keys[: position + 1], values[: position + 1]


def tokens_computed(prompt, new, cached):
    if not new:
        return 0
    return prompt + new - 1 if cached else sum(prompt + i for i in range(new))
