"""Exercises of the lesson on the cost model. Write the three functions, then run `tilewise check costmodel`."""


def slowdown(runtimes, scores, k):
    """Compute how much slower the best of a model's first k choices is than the best configuration: 0.05 means 5 %.

    `runtimes` and `scores` have one value per configuration; the model chooses the lowest scores first.
    """
    raise NotImplementedError


def ordered_pairs(runtimes, scores):
    """Return the share of pairs of configurations whose scores are in the same order as their runtimes.

    Pairs with equal runtimes are not counted; pairs with equal scores are in the wrong order.
    """
    raise NotImplementedError


def tile_numbers(shape, tile):
    """Describe a float32 matrix product of shape (m, n, k) that is divided into tiles (tm, tn, tk).

    Return a dictionary: "tiles" is the number of output tiles, "waste" the share of the padded work that is padding,
    and "bytes" the size of one block of a, b and c together.
    """
    raise NotImplementedError
