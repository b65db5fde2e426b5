"""Models for TpuGraphs' layout collections, which rank the tensor layouts of whole programs.

Start with `open_layouts`, `train_layouts` and `load_layout_model`.
"""

from tilewise.costmodel.layout.graph import (
    COLLECTIONS,
    LayoutDataset,
    LayoutGraph,
    make_graph,
    open_graph,
    open_layouts,
    write_graph,
)
from tilewise.costmodel.layout.synthetic import synthetic_graph, write_synthetic
from tilewise.costmodel.layout.train import train_layouts
from tilewise.costmodel.layout.trained import TrainedLayoutModel, load_layout_model

__all__ = [
    "COLLECTIONS",
    "LayoutDataset",
    "LayoutGraph",
    "TrainedLayoutModel",
    "load_layout_model",
    "make_graph",
    "open_graph",
    "open_layouts",
    "synthetic_graph",
    "train_layouts",
    "write_graph",
    "write_synthetic",
]
