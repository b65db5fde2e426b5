"""Answers to the exercises on the cost model."""

import numpy as np


def slowdown(runtimes, scores, k):
    first = np.argsort(scores, kind="stable")[:k]
    return float(runtimes[first].min() / runtimes.min() - 1)


def ordered_pairs(runtimes, scores):
    right = total = 0
    for i in range(len(runtimes)):
        for j in range(len(runtimes)):
            if runtimes[i] < runtimes[j]:
                total += 1
                right += scores[i] < scores[j]
    return right / total


def tile_numbers(shape, tile):
    counts = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
    padded = np.prod([count * step for count, step in zip(counts, tile, strict=True)])
    m, n, k = tile
    return {
        "tiles": counts[0] * counts[1],
        "waste": 1 - float(np.prod(shape) / padded),
        "bytes": 4 * (m * k + k * n + m * n),
    }
