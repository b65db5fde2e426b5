"""Answers to the exercises on pruning."""

import numpy as np


def magnitude_mask(weights, sparsity):
    zeros = round(sparsity * weights.size)
    mask = np.ones(weights.size, bool)
    mask[np.argsort(np.abs(weights), axis=None)[:zeros]] = False
    return mask.reshape(weights.shape)


def two_of_four(weights):
    groups = weights.reshape(-1, 4).copy()
    smallest = np.argsort(np.abs(groups), axis=1)[:, :2]
    np.put_along_axis(groups, smallest, 0, axis=1)
    return groups.reshape(weights.shape)


def remove_units(w1, b1, w2, kept):
    return w1[kept], b1[kept], w2[:, kept]
