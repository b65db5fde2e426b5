"""Compatibility module for documents that refer to this path; the code is in `costmodel/hlo/operations.py`."""

from tilewise.costmodel.hlo.operations import (
    attention_graph,
    conv_graph,
    int8_matmul_graph,
    matmul_graph,
    norm_graph,
    reduction_graph,
    softmax_graph,
)

__all__ = ["attention_graph", "conv_graph", "int8_matmul_graph", "matmul_graph", "norm_graph", "reduction_graph",
           "softmax_graph"]  # fmt: skip
