"""Exercises of the lesson on the cost model. Write the three functions, then run `tilewise check costmodel`."""


def slowdown(runtimes, scores, k):
    """How much slower the best of the k lowest-scored configurations is than the best of all: 0.05 is 5 %."""
    raise NotImplementedError


def ordered_pairs(runtimes, scores):
    """The share of pairs with different runtimes whose scores are in the same order (equal scores are not)."""
    raise NotImplementedError


def tile_numbers(shape, tile):
    """{"tiles", "waste", "bytes"} of a float32 product (m, n, k) cut in tiles (tm, tn, tk).

    The number of output tiles, the share of the padded work that is padding, and the bytes of one block of a, b and c.
    """
    raise NotImplementedError
