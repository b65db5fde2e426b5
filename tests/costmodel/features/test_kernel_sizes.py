"""Which operation of a kernel gives it its sizes."""

from __future__ import annotations

import numpy as np

from course.synthetic_tiles import FusionBuilder
from tilewise.costmodel.data.kernel import make_kernel
from tilewise.costmodel.features.ranker import heaviest_node, kernel_sizes


def test_a_large_reduction_is_heavier_than_a_tiny_product() -> None:
    graph = FusionBuilder()
    small = [graph.add("parameter", (8, 8), (0, 1), "f32") for _ in range(2)]
    dot = graph.add("dot", (8, 8), (0, 1), "f32", small)
    large = graph.add("parameter", (4096, 4096), (0, 1), "f32")
    reduction = graph.add("reduce", (4096,), (0,), "f32", [large])
    graph.mark_root(graph.add("add", (4096,), (0,), "f32", [reduction, dot]))
    kernel = make_kernel(
        "reduction_0",
        np.stack(graph.nodes),
        np.array(graph.opcodes, np.uint8),
        np.array(graph.edges, np.int64),
        config_feat=np.ones((2, 24), np.float32),
        config_runtime=np.array([2, 3]),
        config_runtime_normalizers=np.array([2, 2]),
    )
    assert heaviest_node(kernel) == reduction
    assert kernel_sizes(kernel)[12:14].tolist() == [4096, 4096]  # the operand of the heaviest operation
