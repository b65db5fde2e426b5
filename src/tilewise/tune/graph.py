"""The graph builder under its former name; it lives in `tilewise.costmodel.graph`."""

from tilewise.costmodel.graph import GraphBuilder, KernelGraph, Node, Shape, Window

__all__ = ["GraphBuilder", "KernelGraph", "Node", "Shape", "Window"]
