"""Exercises of the lesson on pruning. Write the three functions, then run `tilewise check pruning`."""


def magnitude_mask(weights, sparsity):
    """True where a weight stays: the round(sparsity * size) smallest magnitudes go."""
    raise NotImplementedError


def two_of_four(weights):
    """The weights (rows, multiple of 4) with the two smallest of every four neighbours in a row set to zero."""
    raise NotImplementedError


def remove_units(w1, b1, w2, kept):
    """(w1, b1, w2) of a network relu(x @ w1.T + b1) @ w2.T that has only the hidden units `kept`."""
    raise NotImplementedError
