"""HLO modules to features: every column against a value worked out by hand, and whatever a damaged file may hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.costmodel import featurize_hlo
from tilewise.costmodel.data.schema import NODE_FEATURES, OPCODE_NUMBER
from tilewise.costmodel.data.shards import read_kernel
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.proto import hlo_pb2, tuning_pb2
from tilewise.costmodel.hlo.tuning_data import convert_tuning_data, read_tuning_data
from tilewise.costmodel.layout.graph import open_graph
from tilewise.errors import FileFormatError

SAMPLES = next(
    (p for up in Path(__file__).resolve().parents if (p := up / "shared/data/tpugraphs").is_dir()), Path("missing")
)
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the sample files are not beside this checkout")
ONES = {f"{stem}_product" for stem in ("window_size", "window_stride", "window_padding_low", "window_padding_high")} | {
    f"{stem}_product"
    for stem in (
        "shape_dimensions", "window_window_dilation", "window_base_dilation", "slice_dims_start", "slice_dims_stride",
        "slice_dims_limit", "dynamic_slice_sizes", "padding_config_edge_padding_low",
        "padding_config_edge_padding_high",
    )
}  # fmt: skip


def module_of(*instructions: hlo_pb2.HloInstructionProto, root: int = 1) -> bytes:
    computation = hlo_pb2.HloComputationProto(instructions=instructions, id=7, root_id=root)
    return hlo_pb2.HloModuleProto(computations=[computation]).SerializeToString()


def by_name(row: np.ndarray) -> dict[str, float]:
    """The columns that differ from an instruction with nothing set."""
    return {
        name: float(value)
        for name, value in zip(NODE_FEATURES, row, strict=True)
        if value != (1 if name in ONES else 0)
    }


def features_of(**fields: object) -> dict[str, float]:
    return by_name(featurize_hlo(module_of(hlo_pb2.HloInstructionProto(id=2, **fields))).node_feat[0])


def test_empty_lists_have_product_one_and_everything_else_zero() -> None:
    assert features_of() == {"shape_element_type_is_invalid_type": 1.0}


def test_root_is_marked_by_its_own_computation() -> None:
    graph = featurize_hlo(module_of(hlo_pb2.HloInstructionProto(id=5), hlo_pb2.HloInstructionProto(id=6), root=6))
    assert graph.node_feat[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, "pred"), (8, "u32"), (11, "f32"), (12, "f64"), (13, "tuple"), (14, "opaque_type"), (15, "c64"), (16, "bf16"),
     (17, "token"), (18, "c128")],
)  # fmt: skip
def test_element_type_is_one_hot_by_xlas_number(number: int, name: str) -> None:
    assert features_of(shape=hlo_pb2.ShapeProto(element_type=number)) == {f"shape_element_type_is_{name}": 1.0}


def test_an_element_type_younger_than_the_dataset_has_no_column() -> None:
    assert features_of(shape=hlo_pb2.ShapeProto(element_type=21)) == {}


def test_shape_keeps_six_sizes_but_sums_and_multiplies_all() -> None:
    shape = hlo_pb2.ShapeProto(element_type=11, dimensions=[2, 3, 5, 7, 11, 13, 17])
    shape.layout.minor_to_major.extend([6, 5, 4, 3, 2, 1, 0])
    values = features_of(shape=shape)
    assert [values[f"shape_dimensions_{i}"] for i in range(6)] == [2, 3, 5, 7, 11, 13]
    assert values["shape_dimensions_sum"] == 58
    assert values["shape_dimensions_product"] == 510510
    assert [values[f"layout_minor_to_major_{i}"] for i in range(6)] == [6, 5, 4, 3, 2, 1]


def test_products_are_rounded_to_float32_once() -> None:
    # 16777217 x 3 is exact in int64 and rounds to 50331652; rounding the factor first would give 50331648.
    values = features_of(shape=hlo_pb2.ShapeProto(element_type=11, dimensions=[16777217, 3]))
    assert values["shape_dimensions_product"] == np.float32(50331651)
    assert values["shape_dimensions_0"] == np.float32(16777217)


def test_products_wrap_as_64_bit_integers() -> None:
    values = features_of(shape=hlo_pb2.ShapeProto(element_type=11, dimensions=[2**32, 2**31]))
    assert values["shape_dimensions_product"] == -(2.0**63)


def test_window_features_come_per_dimension_and_reversal_is_counted() -> None:
    window = hlo_pb2.Window()
    window.dimensions.add(size=3, stride=2, padding_low=1, padding_high=-1, window_dilation=1, base_dilation=4)
    window.dimensions.add(size=5, stride=1, window_dilation=2, base_dilation=1, window_reversal=True)
    values = features_of(window=window)
    expected = {
        "window_size_0": 3, "window_size_1": 5, "window_size_sum": 8, "window_size_product": 15,
        "window_stride_0": 2, "window_stride_1": 1, "window_stride_sum": 3, "window_stride_product": 2,
        "window_padding_low_0": 1, "window_padding_low_sum": 1, "window_padding_low_product": 0,
        "window_padding_high_0": -1, "window_padding_high_sum": -1, "window_padding_high_product": 0,
        "window_window_dilation_0": 1, "window_window_dilation_1": 2, "window_window_dilation_sum": 3,
        "window_window_dilation_product": 2,
        "window_base_dilation_0": 4, "window_base_dilation_1": 1, "window_base_dilation_sum": 5,
        "window_base_dilation_product": 4,
        "window_window_reversal_1": 1, "window_window_reversal_true_count": 1, "window_window_reversal_false_count": 1,
        "shape_element_type_is_invalid_type": 1,
    }  # fmt: skip
    assert values == expected


def test_convolution_numbers_slices_and_padding_land_in_their_columns() -> None:
    numbers = hlo_pb2.ConvolutionDimensionNumbers(
        input_batch_dimension=1, input_feature_dimension=2, input_spatial_dimensions=[3, 4, 5, 6, 7],
        kernel_input_feature_dimension=8, kernel_output_feature_dimension=9, kernel_spatial_dimensions=[10, 11],
        output_batch_dimension=12, output_feature_dimension=13,
    )  # fmt: skip
    slices = [
        hlo_pb2.HloInstructionProto.SliceDimensions(start=a, limit=b, stride=c)
        for a, b, c in [(1, 9, 2), (3, 7, 5), (2, 3, 1)]
    ]
    padding = hlo_pb2.PaddingConfig()
    padding.dimensions.add(edge_padding_low=2, edge_padding_high=3)
    values = features_of(
        convolution_dimension_numbers=numbers, feature_group_count=14, batch_group_count=15, slice_dimensions=slices,
        dynamic_slice_sizes=[4, 6, 8], padding_config=padding, is_stable=True, parameter_number=16, dimensions=[17, 18],
        shape=hlo_pb2.ShapeProto(element_type=13, tuple_shapes=[hlo_pb2.ShapeProto()] * 3),
    )  # fmt: skip
    prefix = "convolution_dim_numbers_"
    expected = {
        "shape_element_type_is_tuple": 1, "shape_tuple_shapes_size": 3, "parameter_number": 16, "dimensions_0": 17,
        "dimensions_1": 18, f"{prefix}input_batch_dim": 1, f"{prefix}input_feature_dim": 2,
        **{f"{prefix}input_spatial_dims_{i}": 3 + i for i in range(4)},
        f"{prefix}kernel_input_feature_dim": 8, f"{prefix}kernel_output_feature_dim": 9,
        f"{prefix}kernel_spatial_dims_0": 10, f"{prefix}kernel_spatial_dims_1": 11, f"{prefix}output_batch_dim": 12,
        f"{prefix}output_feature_dim": 13, "feature_group_count": 14, "batch_group_count": 15,
        "slice_dims_start_0": 1, "slice_dims_start_1": 3, "slice_dims_start_sum": 6, "slice_dims_start_product": 6,
        "slice_dims_stride_0": 2, "slice_dims_stride_1": 5, "slice_dims_stride_sum": 8, "slice_dims_stride_product": 10,
        "slice_dims_limit_0": 9, "slice_dims_limit_1": 7, "slice_dims_limit_sum": 19, "slice_dims_limit_product": 189,
        "dynamic_slice_sizes_0": 4, "dynamic_slice_sizes_1": 6, "dynamic_slice_sizes_sum": 18,
        "dynamic_slice_sizes_product": 192,
        "padding_config_edge_padding_low_0": 2, "padding_config_edge_padding_low_sum": 2,
        "padding_config_edge_padding_low_product": 2, "padding_config_edge_padding_high_0": 3,
        "padding_config_edge_padding_high_sum": 3, "padding_config_edge_padding_high_product": 3, "is_stable": 1,
    }  # fmt: skip
    assert values == expected


def test_every_opcode_has_its_number_and_a_new_one_is_zero() -> None:
    names = ["parameter", "fusion", "tan", "an-opcode-of-tomorrow"]
    graph = featurize_hlo(module_of(*(hlo_pb2.HloInstructionProto(id=i, opcode=o) for i, o in enumerate(names))))
    assert graph.node_opcode.tolist() == [63, 41, 120, 0]
    assert graph.node_opcode.dtype == np.uint8


def called_module() -> hlo_pb2.HloModuleProto:
    """A callee of two instructions, and a caller that uses one operand twice and calls the callee twice."""
    make = hlo_pb2.HloInstructionProto
    callee = hlo_pb2.HloComputationProto(
        id=50, root_id=90, instructions=[make(id=90, opcode="add", operand_ids=[91]), make(id=91, opcode="parameter")]
    )
    caller = hlo_pb2.HloComputationProto(
        id=51,
        root_id=10,
        instructions=[
            make(id=30, opcode="parameter"),
            make(id=20, opcode="multiply", operand_ids=[30, 30]),
            make(id=10, opcode="call", operand_ids=[30, 20], called_computation_ids=[50, 50]),
        ],
    )
    return hlo_pb2.HloModuleProto(computations=[callee, caller], entry_computation_id=51)


def test_edges_run_from_consumer_to_distinct_operands_and_called_roots_in_order() -> None:
    graph = featurize_hlo(called_module().SerializeToString())
    assert graph.edge_index.tolist() == [[0, 1], [3, 2], [4, 0], [4, 0], [4, 2], [4, 3]]
    assert graph.edge_index.dtype == np.int64


def test_a_single_instruction_has_no_edges() -> None:
    assert featurize_hlo(module_of(hlo_pb2.HloInstructionProto(id=1))).edge_index.shape == (0, 2)


@pytest.mark.parametrize("content", [b"", b"\xff", b"\x1a\x05abc", b"not a module at all"])
def test_bytes_that_are_no_module_get_one_sentence(content: bytes) -> None:
    with pytest.raises(FileFormatError) as caught:
        featurize_hlo(content)
    assert str(caught.value).endswith(".")


def test_a_missing_operand_gets_one_sentence() -> None:
    with pytest.raises(FileFormatError, match="refers to instruction 99"):
        featurize_hlo(module_of(hlo_pb2.HloInstructionProto(id=1, opcode="add", operand_ids=[99])))


def test_tuples_nested_beyond_reason_get_one_sentence() -> None:
    shape = b""
    for _ in range(5000):
        length, size = len(shape), b""
        while length >= 128:
            size, length = size + bytes([length % 128 + 128]), length // 128
        shape = b"\x22" + size + bytes([length]) + shape
    from google.protobuf.internal.encoder import _VarintBytes

    instruction = b"\x1a" + _VarintBytes(len(shape)) + shape
    computation = b"\x12" + _VarintBytes(len(instruction)) + instruction
    with pytest.raises(FileFormatError):
        featurize_hlo(b"\x1a" + _VarintBytes(len(computation)) + computation)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_modules_are_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(called_module().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) + 20 :]
    try:
        graph = featurize_hlo(bytes(content))
    except FileFormatError as error:
        assert "\n" not in str(error)
    else:
        check_consistent(graph)


def check_consistent(graph: KernelGraph) -> None:
    assert graph.node_feat.shape == (len(graph.node_opcode), len(NODE_FEATURES))
    assert np.isfinite(graph.node_feat).all()
    assert graph.edge_index.size == 0 or 0 <= graph.edge_index.min() <= graph.edge_index.max() < len(graph.node_opcode)


def tuning_data() -> tuning_pb2.TuningData:
    data = tuning_pb2.TuningData()
    for repeat in range(2):
        kernel = data.modules.add(module=called_module())
        for tile, time, error in [([8, 128], 500, False), ([], 400, False), ([4], 1, False), ([2], 300, True)]:
            run = kernel.runs.add(has_error=error, is_default=not tile)
            run.op_config.tile_size_config.output_bounds.extend(tile)
            run.execution_profile.compute_time_ns = time + repeat * (time > 1)
    unusable = data.modules.add(module=called_module())
    unusable.runs.add(is_default=True)
    return data


def test_tuning_data_becomes_kernel_files_of_valid_runs(tmp_path: Path) -> None:
    path = tmp_path / "prog.pb"
    path.write_bytes(tuning_data().SerializeToString())
    result = convert_tuning_data(path, tmp_path / "out")
    assert (result.runs, result.valid_runs, len(result.files)) == (9, 4, 2)
    assert len(result.skipped) == 1
    kernel = read_kernel(result.files[1], 24)
    assert kernel.program == "prog"
    assert kernel.runtime.tolist() == [501, 401]
    assert kernel.normalizer.tolist() == [401, 401]
    assert kernel.config_feat[0, 8:16].tolist() == [8, 128, 0, 0, 0, 0, 136, 1024]
    assert not kernel.config_feat[1].any()  # the product of an empty list is zero here
    with np.load(result.files[0], allow_pickle=False) as arrays:
        assert arrays["edge_index"].dtype == np.int64
        assert arrays["node_opcode"].dtype == np.uint8


def layout_tuning_data() -> tuning_pb2.TuningFile:
    data = tuning_pb2.TuningFile(modules=[called_module().SerializeToString()], config_index_to_node=[2, 0])
    for time, error in [(500, False), (400, False), (300, True)]:
        run = data.runs.add(has_error=error, is_default=time == 400)
        run.execution_profile.compute_time_ns = time
        for order in ([1, 0], [0, 1, 2]):
            node = run.module_config.layout_config.nodes.add()
            node.tensors.add(dims=order)
            node.tensors.add(dims=[0])
    return data


def test_layout_tuning_data_becomes_the_graph_of_a_program(tmp_path: Path) -> None:
    path = tmp_path / "prog.pb"
    path.write_bytes(layout_tuning_data().SerializeToString())
    result = convert_tuning_data(path, tmp_path / "out")
    assert (result.runs, result.valid_runs, result.unit) == (3, 2, "graph")
    graph = open_graph(result.files[0], tmp_path / "cache")
    assert graph.config_ids.tolist() == [2, 0] and graph.runtime.tolist() == [500, 400]
    assert graph.config_feat[1, 0].tolist() == [1, 0, -1, -1, -1, -1, 0, *[-1] * 11]
    expected = featurize_hlo(called_module().SerializeToString())
    np.testing.assert_array_equal(graph.node_feat, expected.node_feat)
    np.testing.assert_array_equal(graph.edge_index, expected.edge_index)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_layout_tuning_data_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(layout_tuning_data().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.getbasetemp()
    (folder / "mutated.pb").write_bytes(content)
    try:
        convert_tuning_data(folder / "mutated.pb", folder / "converted")
    except FileFormatError as error:
        assert "\n" not in str(error)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_tuning_data_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(tuning_data().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.pb"
    path.write_bytes(content)
    try:
        tuning = read_tuning_data(path)
    except FileFormatError as error:
        assert "\n" not in str(error)
    else:
        assert all(kernel.runtime.min() > 1 for kernel in tuning.kernels)


@needs_samples
def test_the_fifteen_measured_kernels_convert(tmp_path: Path) -> None:
    result = convert_tuning_data(SAMPLES / "op_tuning_data.pb", tmp_path)
    assert (len(result.files), result.runs, result.valid_runs) == (15, 754, 752)
    kernels = [read_kernel(path, 24) for path in result.files]
    assert sum(not kernel.config_feat.any() for kernel in kernels) == 3


@needs_samples
@pytest.mark.parametrize(
    "name", ["retinanet.2x2.fp32_-342c949e14733d96", "inception_v3_batch_128_train_426e203f19335d17"]
)
def test_a_module_rebuilt_from_a_dataset_file_gives_its_features_bit_for_bit(name: str) -> None:
    kernel = read_kernel(SAMPLES / f"{name}.npz", 24)
    opcode = {number: text for text, number in OPCODE_NUMBER.items()}
    instructions = []
    for row, number in zip(kernel.node_feat, kernel.node_opcode, strict=True):
        columns = dict(zip(NODE_FEATURES, row.tolist(), strict=True))
        rank = sum(columns[f"shape_dimensions_{i}"] > 0 for i in range(6))
        shape = hlo_pb2.ShapeProto(
            element_type=16 if columns["shape_element_type_is_bf16"] else 11,
            dimensions=[int(columns[f"shape_dimensions_{i}"]) for i in range(rank)],
        )
        shape.layout.minor_to_major.extend(int(columns[f"layout_minor_to_major_{i}"]) for i in range(rank))
        instructions.append(hlo_pb2.HloInstructionProto(id=len(instructions), opcode=opcode[int(number)], shape=shape))
    instructions[1].operand_ids.append(0)
    graph = featurize_hlo(module_of(*instructions))
    np.testing.assert_array_equal(graph.node_feat, kernel.node_feat)
    np.testing.assert_array_equal(graph.edge_index, kernel.edge_index)
    np.testing.assert_array_equal(graph.node_opcode, kernel.node_opcode)
