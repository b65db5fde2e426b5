"""Exercises of the lesson on the cost model. Write the three functions, then run `tilewise check costmodel`."""


def slowdown(runtimes, scores, k):
    """How much slower the best of the k lowest-scored configurations is than the best of all: 0.05 is 5 %."""
    raise NotImplementedError


def ordered_pairs(runtimes, scores):
    """The share of pairs with different runtimes whose scores are in the same order."""
    raise NotImplementedError


def tile_numbers(shape, tile):
    """{"tiles", "waste", "bytes"} of a product (m, n, k) cut in tiles (tm, tn, tk) of float32."""
    raise NotImplementedError
