"""Pruning: set small weights to zero, skip them with sparse kernels, or remove whole filters.

The three most important names: `prune` (zeros, by magnitude), `sparsify` (sparse layers) and `shrink` (fewer filters).
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.prune.conv import SparseConv2d
    from tilewise.prune.int8 import SparseInt8Linear, load_pruned, save_pruned
    from tilewise.prune.masks import MagnitudePruner
    from tilewise.prune.model import LayerSparsity, Pruning, Sensitivity, prune, prune_gradually, sensitivity
    from tilewise.prune.sparse import SparseLinear, sparsify
    from tilewise.prune.structured import prune_conv_filters, shrink

__all__ = [
    "LayerSparsity",
    "MagnitudePruner",
    "Pruning",
    "Sensitivity",
    "SparseConv2d",
    "SparseInt8Linear",
    "SparseLinear",
    "load_pruned",
    "prune",
    "prune_conv_filters",
    "prune_gradually",
    "save_pruned",
    "sensitivity",
    "shrink",
    "sparsify",
]

__getattr__ = late_names(
    __name__,
    {
        ".conv": "SparseConv2d",
        ".int8": "SparseInt8Linear load_pruned save_pruned",
        ".masks": "MagnitudePruner",
        ".model": "LayerSparsity Pruning Sensitivity prune prune_gradually sensitivity",
        ".sparse": "SparseLinear sparsify",
        ".structured": "prune_conv_filters shrink",
    },
)
