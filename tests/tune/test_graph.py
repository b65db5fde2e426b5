"""Graphs built for measured kernels equal those featurized from the compiler's own modules."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.costmodel.data.schema import NODE_COLUMN, OPCODES
from tilewise.costmodel.hlo.graph import GraphBuilder, HloNode, KernelGraph, Window
from tilewise.costmodel.hlo.operations import attention_graph, conv_graph, matmul_graph, norm_graph, softmax_graph
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Problem
from tilewise.tune.workloads import built_in_kernels

XLA_TYPES = {"pred": 1, "s32": 4, "f16": 10, "f32": 11, "bf16": 16}


def as_module(builder: GraphBuilder) -> bytes:
    """The same instructions as a serialized HloModuleProto."""
    hlo_pb2 = pytest.importorskip("tilewise.costmodel.hlo.proto").hlo_pb2
    module = hlo_pb2.HloModuleProto()
    numbers: dict[int, int] = {}
    regions = [node.calls for node in builder.nodes if node.calls is not None]
    for number, nodes in enumerate([*regions, tuple(builder.nodes)], start=1):
        computation = module.computations.add(id=number)
        for node in nodes:
            numbers[id(node)] = len(numbers) + 1
            computation.instructions.append(_instruction(hlo_pb2, node, numbers, regions))
        computation.root_id = numbers[id(nodes[-1])]
    return bytes(module.SerializeToString())


def _instruction(hlo_pb2: object, node: HloNode, numbers: dict[int, int], regions: list[tuple[HloNode, ...]]) -> object:
    instruction = hlo_pb2.HloInstructionProto(id=numbers[id(node)], opcode=node.opcode)  # type: ignore[attr-defined]
    instruction.shape.element_type = XLA_TYPES[node.dtype]
    instruction.shape.dimensions.extend(node.shape)
    features = node.features
    instruction.shape.layout.minor_to_major.extend(
        features[f"layout_minor_to_major_{i}"] for i in range(len(node.shape))
    )
    instruction.dimensions.extend(value for name, value in features.items() if name.startswith("dimensions_"))
    instruction.parameter_number = features.get("parameter_number", 0)
    instruction.operand_ids.extend(numbers[id(operand)] for operand in node.operands)
    if node.calls is not None:
        instruction.called_computation_ids.append(next(i for i, r in enumerate(regions, 1) if r is node.calls))
    for window in node.windows:
        instruction.window.dimensions.add(
            size=window.size, stride=window.stride, padding_low=window.padding_low, padding_high=window.padding_high,
            window_dilation=window.window_dilation, base_dilation=window.base_dilation,
        )  # fmt: skip
    if node.opcode == "convolution":
        numbers_of = instruction.convolution_dimension_numbers
        numbers_of.input_feature_dimension = numbers_of.kernel_input_feature_dimension = 1
        numbers_of.output_feature_dimension = 1
        numbers_of.input_spatial_dimensions.extend((2, 3))
        numbers_of.kernel_spatial_dimensions.extend((2, 3))
        instruction.feature_group_count, instruction.batch_group_count = features["feature_group_count"], 1
    return instruction


def sample_builder() -> GraphBuilder:
    g = GraphBuilder()
    x, w = g.parameter((2, 8, 9, 7), "f32"), g.parameter((6, 4, 3, 3), "f32")
    y = g.convolution(x, w, (2, 6, 5, 4), (Window(3, 2, 1, 1), Window(3, 2, 1, 1)), groups=2)
    bias = g.convert(g.parameter((6,), "bf16"), "f32")
    y = g.binary("maximum", g.binary("add", y, g.broadcast(bias, y.shape, (1,))), g.full(y.shape, "f32"))
    total = g.reduce("add", y, (2, 3))
    g.add("dot", (2, 5), "f32", total, g.parameter((6, 5), "f32", transposed=True))
    return g


def test_a_built_graph_equals_the_featurized_module_in_every_number() -> None:
    from tilewise.costmodel.hlo.featurize import featurize_hlo

    builder = sample_builder()
    expected, built = featurize_hlo(as_module(builder)), builder.build()
    np.testing.assert_array_equal(built.node_feat, expected.node_feat)
    np.testing.assert_array_equal(built.node_opcode, expected.node_opcode)
    np.testing.assert_array_equal(built.edge_index, expected.edge_index)


def opcodes(graph: KernelGraph) -> list[str]:
    return [OPCODES[number] for number in graph.node_opcode]


def test_a_matmul_says_its_sizes_layout_and_epilogue() -> None:
    graph = matmul_graph("tf32", (0, 5, 6, 7), "nt", "bias_relu")
    assert opcodes(graph) == [
        "parameter", "parameter", "reduce-precision", "reduce-precision", "dot",
        "parameter", "broadcast", "add", "constant", "broadcast", "maximum",
    ]  # fmt: skip
    dims = NODE_COLUMN["shape_dimensions_0"]
    assert graph.node_feat[:2, dims : dims + 2].tolist() == [[5, 7], [7, 6]]
    layout = NODE_COLUMN["layout_minor_to_major_0"]
    assert graph.node_feat[:2, layout : layout + 2].tolist() == [[1, 0], [0, 1]]
    assert graph.node_feat[:, NODE_COLUMN["is_root"]].tolist() == [0] * 10 + [1]


def test_epilogues_layouts_and_types_give_different_graphs() -> None:
    units = set()
    for dtype in ("bf16", "fp16", "tf32", "fp32"):
        for layout in ("nn", "nt", "tn", "tt"):
            for epilogue in ("none", "bias", "bias_relu", "bias_gelu", "residual"):
                graph = matmul_graph(dtype, (0, 8, 9, 10), layout, epilogue)
                units.add((graph.node_feat.tobytes(), graph.node_opcode.tobytes(), graph.edge_index.tobytes()))
    assert len(units) == 4 * 4 * 5


@pytest.mark.parametrize(
    "graph",
    [
        softmax_graph("bf16", 3, 4),
        norm_graph("fp32", 3, 4, rms=False),
        norm_graph("fp16", 3, 4, rms=True),
        attention_graph("bf16", 2, 8, 2, 16, 32, 64, causal=True),
        conv_graph((1, 3, 8, 8), (4, 3, 3, 3), (1, 1), (1, 1), 1, "bias_relu"),
    ],
    ids=["softmax", "layer_norm", "rms_norm", "attention", "conv"],
)
def test_graphs_are_connected_and_in_topological_order_within_the_main_computation(graph: KernelGraph) -> None:
    consumers, producers = graph.edge_index.T
    assert (producers < consumers).all()
    used = set(producers.tolist())
    root = len(graph.node_opcode) - 1
    assert graph.node_feat[root, NODE_COLUMN["is_root"]] == 1
    assert used >= set(range(root))


def test_every_family_of_the_programs_has_a_graph() -> None:
    problems: dict[str, Problem] = {}
    for kernel in built_in_kernels("triton"):
        problems.setdefault(kernel.problem.family, kernel.problem)
    for name, problem in problems.items():
        assert len(get_family(name).graph(problem).node_opcode) >= 2, name
