"""TpuGraphs' layout collections: graphs of whole programs, ranked by the layouts of their tensors."""

from tilewise.costmodel.layout.collection import COLLECTIONS, Layouts, open_layouts
from tilewise.costmodel.layout.graph import LayoutGraph, make_graph, open_graph, write_graph
from tilewise.costmodel.layout.synthetic import synthetic_graph, write_synthetic
from tilewise.costmodel.layout.train import train_layouts
from tilewise.costmodel.layout.trained import TrainedLayouts, load_layout_model

__all__ = [
    "COLLECTIONS",
    "LayoutGraph",
    "Layouts",
    "TrainedLayouts",
    "load_layout_model",
    "make_graph",
    "open_graph",
    "open_layouts",
    "synthetic_graph",
    "train_layouts",
    "write_graph",
    "write_synthetic",
]
