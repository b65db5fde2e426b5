"""Exercises of the lesson on pruning. Write the three functions, then run `tilewise check pruning`."""


def magnitude_mask(weights, sparsity):
    """Return a boolean mask for magnitude pruning, in the shape of `weights`: False where a weight is removed.

    The round(sparsity * size) weights with the smallest magnitudes are removed.
    """
    raise NotImplementedError


def two_of_four(weights):
    """Return a copy of `weights` in which two of every four neighbours in a row are zero: the two smallest magnitudes.

    `weights` has two axes; the length of a row is a multiple of four.
    """
    raise NotImplementedError


def remove_units(w1, b1, w2, kept):
    """Remove hidden units from the network relu(x @ w1.T + b1) @ w2.T, and return the smaller (w1, b1, w2).

    `kept` lists the hidden units that remain.
    """
    raise NotImplementedError
