"""Pruning: weights set to zero and skipped, filters removed."""

from tilewise.prune.conv import SparseConv2d
from tilewise.prune.masks import MagnitudePruner
from tilewise.prune.model import LayerSparsity, Pruning, Sensitivity, prune, sensitivity
from tilewise.prune.sparse import SparseLinear, sparsify
from tilewise.prune.structured import prune_conv_filters, shrink

__all__ = [
    "LayerSparsity",
    "MagnitudePruner",
    "Pruning",
    "Sensitivity",
    "SparseConv2d",
    "SparseLinear",
    "prune",
    "prune_conv_filters",
    "sensitivity",
    "shrink",
    "sparsify",
]
