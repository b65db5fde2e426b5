"""TpuGraphs' layout collections: graphs of whole programs, ranked by the layouts of their tensors."""

from tilewise.costmodel.layout.collection import COLLECTIONS, Layouts, open_layouts
from tilewise.costmodel.layout.graph import LayoutGraph, make_graph, open_graph, write_graph
from tilewise.costmodel.layout.synthetic import synthetic_graph, write_synthetic

__all__ = [
    "COLLECTIONS",
    "LayoutGraph",
    "Layouts",
    "make_graph",
    "open_graph",
    "open_layouts",
    "synthetic_graph",
    "write_graph",
    "write_synthetic",
]
